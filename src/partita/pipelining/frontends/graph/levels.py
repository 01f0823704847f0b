"""Levels of ``torch.func`` in a captured model: a stage runs all of one."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule

from partita.errors import CaptureError
from partita.graph.levels import inside_levels

__all__ = ["check_levels"]


def check_levels(gm: GraphModule, assignment: Mapping[str, int]) -> None:
    """Check that no cut lies within a level.

    Args:
        assignment: the stage of each node that computes.

    Raises:
        CaptureError: names the nodes on both sides of the cut.
    """
    inside = inside_levels(gm)
    before = None
    for position, node in enumerate(gm.graph.nodes):
        if node.name not in assignment:
            continue
        if before is not None and assignment[before] != assignment[node.name]:
            raise CaptureError(
                f"the cut between {before!r} and {node.name!r} lies within a transform of torch.func (vmap), "
                "whose tensors can't leave it, and so must lie in one stage: cut at a module around it, "
                "or at another"
            )
        before = node.name if position in inside else None
