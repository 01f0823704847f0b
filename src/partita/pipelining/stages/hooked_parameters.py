"""Parameters whose hooks see gradients: a hook may change the gradient, and must not change the parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from partita._torch.modules.contents import parameters_in
from partita._torch.tensors.parameters import has_hooks, joint_hooks
from partita._torch.tensors.versions import times_written
from partita.errors import ExecutionError, NotSupported

__all__ = ["HookedParameters", "check_joint_hooks"]


def check_joint_hooks(stages: Sequence[nn.Module]) -> None:
    """Check that no hook waits for gradients of several stages, whose backward passes are passes by
    themselves: it would be called in each with a part of what it waits for.

    Raises:
        NotSupported: one of ``register_multi_grad_hook`` does; names parameters and stages.
    """
    first: dict[int, tuple[str, int]] = {}
    for stage, module in enumerate(stages):
        for name, parameter in parameters_in(module):
            for hook in joint_hooks(parameter):
                other, where = first.setdefault(hook, (name, stage))
                if where != stage and name == other:
                    raise NotSupported(
                        f"a hook of register_multi_grad_hook() waits for the gradient of {name!r}, which is "
                        f"tied over the stages {where} and {stage}, and each has a share of it: use "
                        "register_hook(), or look at the gradient after the schedule's step()"
                    )
                if where != stage:
                    raise NotSupported(
                        f"a hook of register_multi_grad_hook() waits for the gradients of {other!r} in stage "
                        f"{where} and of {name!r} in stage {stage}, which come in passes of their own: "
                        "register one hook for the parameters of each stage, or look at the gradients after "
                        "the schedule's step()"
                    )


class HookedParameters:
    """The parameters of a stage that have such hooks when a step begins."""

    def __init__(self, module: nn.Module, stage: int, microbatches: int) -> None:
        self._stage = stage
        self._microbatches = microbatches
        self._parameters = [
            (name, parameter)
            for name, parameter in (parameters_in(module) if microbatches > 1 else ())
            if has_hooks(parameter)
        ]

    def unchanged(self) -> AbstractContextManager[None]:
        """Check that the backward pass in this block changes none of them: microbatches whose forward pass
        has been would be run with the weights of before, and those to come with others.

        Raises:
            ExecutionError: it has; names the parameter.
        """
        return self._checked() if self._parameters else nullcontext()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        before = [times_written(parameter) for _, parameter in self._parameters]
        yield
        for (name, parameter), count in zip(self._parameters, before, strict=True):
            if times_written(parameter) != count:
                raise ExecutionError(
                    f"parameter {name!r} of stage {self._stage} was changed in the backward pass of one of "
                    f"{self._microbatches} microbatches, while others are under way: call the optimizer's "
                    "step() after the schedule's step(), not in a hook"
                )
