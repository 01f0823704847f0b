"""What a node's value follows from."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

__all__ = ["ancestors"]


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes and all that they are computed from."""
    waiting = list(nodes)
    seen = set(waiting)
    while waiting:
        fresh = set(waiting.pop().all_input_nodes) - seen
        seen |= fresh
        waiting += fresh
    return seen
