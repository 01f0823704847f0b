"""Where a model is cut into stages: by hand (``pipe_split``, split points) or by plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita.capture.origin import module_paths
from partita.errors import AssignmentError, InfeasiblePlan

__all__ = ["SplitPoint", "cuts_at_marks", "cuts_at_points", "pipe_split", "stage_assignment"]

_library = torch.library.Library("partita", "DEF")
_library.define("pipe_split() -> ()")
_library.impl("pipe_split", lambda: None, "BackendSelect")
_MARK = torch.ops.partita.pipe_split.default
torch.fx.has_side_effect(_MARK)


class SplitPoint(Enum):
    """Where a stage starts: before the named module's first operation, or after its last."""

    BEGINNING = 1
    END = 2


def pipe_split() -> None:
    """Mark the end of a stage inside a model's ``forward``. Does nothing when the model runs."""
    torch.ops.partita.pipe_split()


def cuts_at_marks(gm: GraphModule) -> list[int]:
    """Take the `pipe_split` marks out of a graph, in place; the positions of the nodes that they came
    after.
    """
    cuts, position = [], -1
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is _MARK:
            cuts.append(position)
            gm.graph.erase_node(node)
        else:
            position += 1
    if cuts:
        gm.recompile()
    return cuts


def cuts_at_points(gm: GraphModule, model: nn.Module, points: Mapping[str, SplitPoint]) -> list[int]:
    """The cuts that split points ask for.

    Raises:
        AttributeError: the model has no submodule of that name.
        AssignmentError: no operation of the graph belongs to the submodule.
    """
    nodes = list(gm.graph.nodes)
    cuts = []
    for path, point in points.items():
        _check_submodule(model, path)
        inside = [position for position, node in enumerate(nodes) if _belongs(node, path)]
        if not inside:
            raise AssignmentError(
                f"no operation of the graph belongs to {path!r}: is the module called in forward?"
            )
        cuts.append(inside[0] - 1 if SplitPoint(point) is SplitPoint.BEGINNING else inside[-1])
    return sorted(cuts)


def _check_submodule(model: nn.Module, path: str) -> None:
    current = model
    for atom in path.split("."):
        child = getattr(current, atom, None)
        if not isinstance(child, nn.Module):
            raise AttributeError(
                f"split point {path!r}: {type(current).__name__} has no submodule {atom!r}; "
                f"it has {', '.join(name for name, _ in current.named_children()) or 'none'}"
            )
        current = child


def _belongs(node: Node, path: str) -> bool:
    return node.op.startswith("call_") and path in module_paths(node)


def stage_assignment(gm: GraphModule, cuts: Iterable[int]) -> dict[str, int]:
    """The stage of every node: one more after each cut.

    Raises:
        InfeasiblePlan: a cut that leaves a stage without anything to compute.
    """
    ends = sorted(set(cuts))
    assignment, stage = {}, 0
    for position, node in enumerate(gm.graph.nodes):
        while stage < len(ends) and position > ends[stage]:
            stage += 1
        if node.op not in ("placeholder", "get_attr", "output"):
            assignment[node.name] = stage
    empty = set(range(len(ends) + 1)) - set(assignment.values())
    if empty:
        raise InfeasiblePlan(
            f"stage {min(empty)} would have nothing to compute: two cuts fall on one place, or one lies "
            "before the first or after the last operation; take one of them away"
        )
    return assignment
