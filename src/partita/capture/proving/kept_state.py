"""What a model keeps in attributes from one call for the next: no graph does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from partita._torch.containers.pytree import tree_map
from partita._torch.tensors.detached_copy import detached_copy
from partita.capture.merging.modes import in_mode
from partita.capture.proving.samples import Sample
from partita.capture.tracing.unchanged import Attributes, rehearsal

__all__ = ["attributes_set", "called_before"]


def called_before(
    module: nn.Module, in_other_mode: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Return a function that calls ``module`` with these arguments before it calls it with its own.

    Args:
        in_other_mode: what runs in the mode that ``module`` is not in: it is called first, if there is one.
    """

    def call(*own_args: Any, **own_kwargs: Any) -> Any:
        if in_other_mode is not None:
            with in_mode(in_other_mode, not module.training):
                in_other_mode(*args, **kwargs)
        module(*args, **kwargs)
        return module(*own_args, **own_kwargs)

    return call


def attributes_set(model: nn.Module, sample: Sample) -> list[str]:
    """Return the names of the attributes that a call of ``model`` changes, besides parameters and buffers.

    What it changes is put back.
    """
    registries = {"_parameters", "_buffers", "_modules"}
    with rehearsal(model):
        before = {
            (path, name): (value, Attributes.of(value))
            for path, module in model.named_modules()
            for name, value in vars(module).items()
        }
        args, kwargs = tree_map(detached_copy, (sample.args, sample.kwargs))
        model(*args, **kwargs)
        return [
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if name not in registries and not _is_still(value, before.get((path, name)))
        ]


def _is_still(value: Any, before: tuple[Any, Attributes] | None) -> bool:
    if before is None or value is not before[0]:
        return False
    return Attributes.of(value).same_as(before[1])
