"""Split points that are stored on a model's submodules until `pipeline` reads them.

They are attributes and nothing else: ``forward`` is the model's own, so an annotated model runs, compiles,
copies and pickles like any other, also inside another model.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from partita.errors import ArgumentError
from partita.pipelining.frontends.cuts.cuts import SplitPoint, find_submodule

__all__ = ["annotate_split_points", "clear_split_points", "split_points"]

_ATTRIBUTE = "_partita_split_points"
"""The name of a submodule's split points among its ``vars()``."""


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Annotate where `pipeline` is to cut: before (``BEGINNING``) or after (``END``) these submodules.

    Calling it again adds split points; one that is there already counts once.

    Args:
        mod: the model, or a part of one.
        spec: from qualified name to `SplitPoint`.

    Raises:
        ModuleNameError: there is no submodule of that name. Nothing is annotated then.
        ArgumentError: a value is no `SplitPoint`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> annotate_split_points(model, {"0": SplitPoint.END})
    >>> split_points(model)
    {'0': (<SplitPoint.END: 2>,)}
    >>> clear_split_points(model)
    """
    points = []
    for path, point in spec.items():
        if not isinstance(point, SplitPoint):
            raise ArgumentError(
                f"the split point of {path!r} is {point!r}: give SplitPoint.BEGINNING or SplitPoint.END"
            )
        points.append((find_submodule(mod, path), point))
    for submodule, point in points:
        earlier = vars(submodule).get(_ATTRIBUTE, ())
        vars(submodule)[_ATTRIBUTE] = tuple(dict.fromkeys((*earlier, point)))


def split_points(mod: nn.Module) -> dict[str, tuple[SplitPoint, ...]]:
    """Return the split points of a model and its submodules, by qualified name; a submodule that is
    registered under several names is there under each.
    """
    modules = mod.named_modules(remove_duplicate=False)
    return {path: points for path, module in modules if (points := vars(module).get(_ATTRIBUTE))}


def clear_split_points(mod: nn.Module) -> None:
    """Remove all split points from a model, so that it can be cut in another way."""
    for module in mod.modules():
        vars(module).pop(_ATTRIBUTE, None)
