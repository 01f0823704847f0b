"""Split points that stay with a model until `pipeline` reads them.

They are notes on the submodules and nothing else: ``forward`` is the model's own, so an annotated model runs,
compiles, copies and pickles like any other, wherever it stands inside another model.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from partita.errors import ArgumentError
from partita.pipelining.frontends.cuts.cuts import SplitPoint, find_submodule

__all__ = ["annotate_split_points", "clear_split_points", "split_points"]

_NOTE = "_partita_split_points"
"""Under this name a submodule's own points lie in its ``vars()``."""


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Note where `pipeline` is to cut: before (``BEGINNING``) or after (``END``) these submodules.

    Calling it again adds to what is noted; a point that is noted already counts once.

    Args:
        mod: the model, or a part of one.
        spec: from qualified name to `SplitPoint`.

    Raises:
        ModuleNameError: there is no submodule of that name. Nothing is noted then.
        ArgumentError: a value that is no `SplitPoint`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> annotate_split_points(model, {"0": SplitPoint.END})
    >>> split_points(model)
    {'0': (<SplitPoint.END: 2>,)}
    >>> clear_split_points(model)
    """
    found = []
    for path, point in spec.items():
        if not isinstance(point, SplitPoint):
            raise ArgumentError(
                f"the split point of {path!r} is {point!r}: give SplitPoint.BEGINNING or SplitPoint.END"
            )
        found.append((find_submodule(mod, path), point))
    for submodule, point in found:
        known = vars(submodule).get(_NOTE, ())
        vars(submodule)[_NOTE] = tuple(dict.fromkeys((*known, point)))


def split_points(mod: nn.Module) -> dict[str, tuple[SplitPoint, ...]]:
    """What is noted on a model and its submodules, by qualified name; a submodule that is registered under
    several names is there under each.
    """
    modules = mod.named_modules(remove_duplicate=False)
    return {path: points for path, module in modules if (points := vars(module).get(_NOTE))}


def clear_split_points(mod: nn.Module) -> None:
    """Take all notes off a model, so that it can be cut in another way."""
    for module in mod.modules():
        vars(module).pop(_NOTE, None)
