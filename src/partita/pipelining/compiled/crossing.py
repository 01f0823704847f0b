"""What goes from one half of a backward graph to the other, chosen so that it takes the least memory.

A minimal cut: each value is an edge as heavy as its bytes, from what it is computed from to what the second
half computes from it. Values on the far side of the cut are computed again there::

    saved x (bf16) ── cast (fp32) ── mm ...     W needs the cast: it keeps x, half as large, and casts again
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator

import torch
from torch.fx import GraphModule, Node

from partita._torch.operators.output_mask import operator_name
from partita._torch.tensors.example_tensors import example_bytes
from partita.graph.effects import metadata

__all__ = ["cheapest_crossing"]

_CASTS = ("aten::_to_copy", "prims::convert_element_type")
_UNLIMITED = 1 << 62


def cheapest_crossing(
    gm: GraphModule,
    first: Collection[Node],
    *,
    fixed: Collection[Node],
    views: Collection[Node],
    free: Collection[str],
    fuses: bool,
) -> set[Node]:
    """Return the operations of the first half that the second one should repeat.

    Args:
        first: the operations of the first half; all others are of the second.
        fixed: operations that must not run twice.
        views: operations whose results lie in the memory of an operand: they cost nothing.
        free: names of inputs that cost nothing to keep.
        fuses: whether elementwise operations cost next to nothing, too.
    """
    import networkx  # a third of a second, for who cuts a compiled backward pass

    demanded = set(_demanded(gm, first))

    def repeatable(node: Node) -> bool:
        if node in fixed or not node.op.startswith("call_"):
            return False
        if node in views or operator_name(node) in _CASTS or not _has_tensors(node):
            return node.target is not operator.getitem or repeatable(node.all_input_nodes[0])
        return fuses and torch.Tag.pointwise in getattr(node.target, "tags", ())

    # Towards the second half, since networkx gives the least that can reach the sink: of equal cuts the one
    # that repeats least, and nothing that the second half does not need.
    flow = networkx.DiGraph()
    queue, seen = list(demanded), set[Node]()
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        costs_nothing = node.op == "get_attr" or node.name in free
        flow.add_edge((node, "in"), (node, "out"), capacity=0 if costs_nothing else _bytes(node))
        if node in demanded:
            flow.add_edge((node, "out"), "second")
        if not repeatable(node):
            flow.add_edge("first", (node, "in"))
            continue
        for operand in node.all_input_nodes:
            flow.add_edge((operand, "out"), (node, "in"))
            queue.append(operand)
        if not node.all_input_nodes:
            flow.add_edge("first", (node, "in"), capacity=0)  # made from nothing
    if not seen:
        return set()
    _, (_, near_second) = networkx.minimum_cut(flow, "first", "second")
    return {node for node in seen if (node, "in") in near_second}


def _demanded(gm: GraphModule, first: Collection[Node]) -> Iterator[Node]:
    """What the second half and its results need of the first half and of the inputs."""
    for node in gm.graph.nodes:
        if node.op.startswith("call_") and node not in first:
            yield from (operand for operand in node.all_input_nodes if _is_outside(operand, first))


def _has_tensors(node: Node) -> bool:
    value = metadata(node)
    return isinstance(value, (torch.Tensor, tuple, list))


def _is_outside(node: Node, first: Collection[Node]) -> bool:
    return not node.op.startswith("call_") or node in first


def _bytes(node: Node) -> int:
    value = metadata(node)
    if isinstance(value, torch.Tensor):
        return example_bytes(value)
    return _UNLIMITED if isinstance(value, (tuple, list)) else 8
