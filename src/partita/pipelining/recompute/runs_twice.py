"""What stands against running a stage twice, or should be known of it."""

from __future__ import annotations

import warnings

from torch import nn

from partita._torch.modules.contents import forward_hooks
from partita.errors import ExecutionError, NotProven

__all__ = ["check_hooks", "check_wrapper", "warn_of_python"]


def check_hooks(module: nn.Module, stage: int) -> None:
    """Check that nobody would see the second forward pass of a stage. Torch's own hooks, such as those of
    ``torch.nn.utils.weight_norm``, belong to what a module computes and may run twice.

    Raises:
        ExecutionError: a module has a forward hook, or all modules have one.
    """
    for path, child in module.named_modules():
        for hook in forward_hooks(child):
            origin = getattr(hook, "__module__", None) or type(hook).__module__
            if origin.partition(".")[0] == "torch":
                continue
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise ExecutionError(
                f"the forward hook {name} of {path or type(child).__name__!r} would be called twice for each "
                f"microbatch, since stage {stage} is recomputed: remove it, or take stage {stage} out of "
                "recompute"
            )


def check_wrapper(module: nn.Module, inner: nn.Module, stage: int) -> None:
    """Check that nothing but a compiled form is around a stage: what a wrapper holds would not be put back.

    Raises:
        ExecutionError: there is a wrapper.
    """
    if module is not inner and getattr(module, "_orig_mod", None) is not inner:
        raise ExecutionError(
            f"stage {stage} is wrapped in {type(module).__name__}, which recompute would run twice: wrap the "
            f"model before it is cut, or take stage {stage} out of recompute"
        )


def warn_of_python(stage: int) -> None:
    """Say, once a stage, what is not proven of code that runs twice."""
    warnings.warn(
        f"stage {stage} runs the model's own code, twice for each microbatch since it is recomputed. Values "
        "are compared on CPUs, and parameters, buffers, numbers and lists are put back; but what the code "
        "changes elsewhere (globals, objects within containers, modules that are not registered) changes "
        'twice. Cut with frontend="export" to be sure',
        NotProven,
        stacklevel=2,
    )
