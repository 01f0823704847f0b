"""The names that a model has for its tensors, compared with those that are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from partita.errors import CheckpointError
from partita.listing import listed
from partita.pipelining.stages.placing.state_of_stage import (
    StateValue,
    by_identity,
    is_opaque,
    stage_modules,
    state_of_stage,
)

__all__ = ["match_model"]


def match_model(
    model: nn.Module,
    shapes: Mapping[str, Sequence[int]],
    where: str,
    message: Callable[[Sequence[str]], str],
) -> list[tuple[str, ...]]:
    """All names of each tensor of a model, in the order of its state dict, after a check that these tensors
    are what is stored, and no others.

    Args:
        model: on any device, ``meta`` too.
        shapes: of what is stored, by name. A tied tensor may have any of its names.
        where: it is stored, for messages.
        message: the text of the error about names that are missing.

    Raises:
        CheckpointError: a name that is missing or too many, or another shape.
    """
    (module,) = stage_modules(model)
    weights = [entry for entry in by_identity(state_of_stage(module)) if not is_opaque(entry)]
    missing = [entry.names[0] for entry in weights if not shapes.keys() & {*entry.names}]
    if missing:
        raise CheckpointError(message(missing))
    further = sorted(shapes.keys() - {name for entry in weights for name in entry.names})
    if further:
        raise CheckpointError(
            f"{where} has {listed(further)}, which the model has not: give the model that was saved, with "
            "the same configuration"
        )
    for entry in weights:
        _check_shape(entry, shapes, where)
    return [entry.names for entry in weights]


def _check_shape(entry: StateValue, shapes: Mapping[str, Sequence[int]], where: str) -> None:
    for name in entry.names:
        if name in shapes and tuple(shapes[name]) != tuple(entry.value.shape):
            raise CheckpointError(
                f"{name!r} has shape {list(shapes[name])} in {where}, and {list(entry.value.shape)} in the "
                "model: give the model that was saved, with the same configuration"
            )
