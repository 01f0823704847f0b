"""Levels of ``torch.func`` (``vmap`` above all) that a graph opens and closes again.

::

    linear ── open ── add_batch_dim ── linear ── remove_batch_dim ── close ── mean
              └──────────── inside: one piece runs all of it ─────────┘

A level belongs to the interpreter, and the tensors in it are of no use outside.
"""

from __future__ import annotations

from torch.fx import GraphModule

from partita._torch.autograd.region_switches import level_change

__all__ = ["inside_levels"]


def inside_levels(gm: GraphModule) -> frozenset[int]:
    """Return the positions of the nodes behind which a level is open: no cut may follow them."""
    inside: set[int] = set()
    depth = 0
    for position, node in enumerate(gm.graph.nodes):
        if node.op == "call_function":
            depth += level_change(node.target)
        if depth:
            inside.add(position)
    return frozenset(inside)
