"""Where a model is cut into stages: by hand (``pipe_split``, split points) or by plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.autograd.region_switches import REGION_SWITCHES
from partita.capture.merging.modes import require_mode
from partita.capture.proving.autocasts import require_autocast
from partita.capture.proving.grad_modes import require_gradients
from partita.capture.tracing.module_paths import module_calls, module_paths
from partita.errors import ArgumentError, AssignmentError, ModuleNameError
from partita.graph.effect_rules.conditions import require_condition

__all__ = [
    "COMPUTES_NOTHING",
    "Place",
    "SplitPoint",
    "SplitSpec",
    "check_points",
    "cuts_at_annotations",
    "cuts_at_marks",
    "cuts_at_points",
    "find_submodule",
    "pipe_split",
    "place_of",
    "stage_assignment",
]

_library = torch.library.Library("partita", "DEF")
_library.define("pipe_split() -> ()")
_library.impl("pipe_split", lambda: None, "BackendSelect")
_MARK = torch.ops.partita.pipe_split.default
torch.fx.has_side_effect(_MARK)
_MARKS = {str(_MARK), "pippy._pipe_split.default"}
"""The marks of partita and of ``torch.distributed.pipelining``, which a model's own code may import."""

COMPUTES_NOTHING = REGION_SWITCHES | {
    torch.is_grad_enabled,
    require_mode,
    require_autocast,
    require_gradients,
    require_condition,
}
"""Switches of regions, and what reads or checks the modes and conditions that a graph was captured under."""

Place = str | tuple[str, int]
"""A submodule by its qualified name, ``"block"``; where it is called several times with the number of the
call, ``"block@1"`` or ``("block", 1)`` for the second.
"""


class SplitPoint(Enum):
    """Where a stage starts: before the named module's first operation, or after its last."""

    BEGINNING = 1
    END = 2

    @classmethod
    def _missing_(cls, value: object) -> SplitPoint:
        raise AssignmentError(
            f"a stage can't start at {value!r}: give SplitPoint.BEGINNING or SplitPoint.END, or both"
        )


SplitSpec = Mapping[str, SplitPoint] | Mapping[tuple[str, int], SplitPoint] | Mapping[Place, SplitPoint]
"""Where to cut: three times, since a type checker takes no ``dict[str, ...]`` for a mapping from `Place`."""


def pipe_split() -> None:
    """Mark the end of a stage inside a model's ``forward``. Does nothing when the model runs."""
    torch.ops.partita.pipe_split()


def cuts_at_marks(gm: GraphModule) -> list[int]:
    """Remove the `pipe_split` marks from a graph, in place, and return the positions of the nodes before
    them.
    """
    cuts, position = [], -1
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and str(node.target) in _MARKS:
            cuts.append(position)
            gm.graph.erase_node(node)
        else:
            position += 1
    if cuts:
        gm.recompile()
    return cuts


def check_points(model: nn.Module, points: SplitSpec) -> None:
    """Check what can be told of split points before a graph is there: a large model takes minutes to capture.

    Raises:
        ArgumentError: no dict.
        ModuleNameError: the model has no submodule of that name.
        AssignmentError: a value that is no `SplitPoint`.
    """
    if not isinstance(points, Mapping):
        raise ArgumentError(
            f"split_spec is {points!r:.60}: give a dict from submodule names to SplitPoint.BEGINNING or "
            "SplitPoint.END"
        )
    for place, point in points.items():
        find_submodule(model, place_of(place)[0])
        SplitPoint(point)


def cuts_at_points(gm: GraphModule, points: SplitSpec) -> list[int]:
    """Return the cuts that split points ask for: the positions of the nodes before them.

    Raises:
        AssignmentError: no operation of the graph belongs to the submodule, or it is called several times and
            the point does not say which call is meant.
    """
    nodes = list(gm.graph.nodes)
    cuts = []
    for place, point in points.items():
        path, call = place_of(place)
        inside = _operations(nodes, path, call)
        cuts.append(inside[0] - 1 if SplitPoint(point) is SplitPoint.BEGINNING else inside[-1])
    return sorted(cuts)


def cuts_at_annotations(
    gm: GraphModule, model: nn.Module, annotations: Mapping[str, Sequence[SplitPoint]]
) -> list[int]:
    """Return the cuts that annotations of a model's submodules ask for.

    Args:
        annotations: by qualified name. Of several names of one submodule those count that the graph has.

    Raises:
        AssignmentError: no operation of the graph belongs to a submodule.
    """
    in_graph = {path for node in gm.graph.nodes if node.op.startswith("call_") for path in module_paths(node)}
    paths: dict[int, list[str]] = {}
    for path in annotations:
        paths.setdefault(id(model.get_submodule(path)), []).append(path)
    cuts: list[int] = []
    for names in paths.values():
        for path in [name for name in names if name in in_graph] or names[:1]:
            for point in annotations[path]:
                cuts += cuts_at_points(gm, {path: point})
    return sorted(cuts)


def find_submodule(model: nn.Module, path: str) -> nn.Module:
    """Return the submodule of that qualified name.

    Raises:
        ModuleNameError: there is none; names it, and the submodules that are there.
    """
    current = model
    for atom in path.split("."):
        child = getattr(current, atom, None)
        if not isinstance(child, nn.Module):
            raise ModuleNameError(
                f"split point {path!r}: {type(current).__name__} has no submodule {atom!r}; "
                f"it has {', '.join(name for name, _ in current.named_children()) or 'none'}"
            )
        current = child
    return current


def place_of(place: Place) -> tuple[str, int | None]:
    """Return the submodule's name, and the number of its call if the place has one."""
    if not isinstance(place, str):
        return place
    path, at, number = place.rpartition("@")
    return (path, int(number)) if at and number.isdigit() else (place, None)


def _operations(nodes: Sequence[Node], path: str, call: int | None) -> list[int]:
    """Positions of the operations of one call of a submodule."""
    calls: dict[int, list[int]] = {}
    for position, node in enumerate(nodes):
        if node.op.startswith("call_"):
            for name, number in module_calls(node):
                if name == path:
                    calls.setdefault(number, []).append(position)
    if not calls:
        raise AssignmentError(
            f"no operation of the graph belongs to {path!r}: is the module called in forward?"
        )
    if call is None and len(calls) == 1:
        return next(iter(calls.values()))
    if call in calls:
        return calls[call]
    choices = ", ".join(
        f"'{path}@{number}' ({nodes[inside[0]].name} to {nodes[inside[-1]].name})"
        for number, inside in calls.items()
    )
    which = "which of them is meant" if call is None else f"one of them, there is no {path}@{call}"
    raise AssignmentError(f"{path!r} is called {len(calls)} times: {choices}; say {which}")


def stage_assignment(gm: GraphModule, cuts: Iterable[int]) -> dict[str, int]:
    """Return the stage of every node: one more after each cut.

    A cut with no operation on one of its sides (before the first one, after the last, or next to another cut)
    does not count: every stage computes something.
    """
    ends = sorted(set(cuts), reverse=True)
    assignment, stage, cut, computed = {}, 0, False, False
    for position, node in enumerate(gm.graph.nodes):
        while ends and position > ends[-1]:
            ends.pop()
            cut = True
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.target not in COMPUTES_NOTHING:
            stage += cut and computed
            cut, computed = False, True
        assignment[node.name] = stage
    return assignment
