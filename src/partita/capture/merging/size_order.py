"""One order for the numbers that a trace works out from open sizes.

A trace computes such a number where it is asked for first, and that may be a check of torch's own: two traces
of one model have them in different places, and could not be merged. Here each stands before its first user::

    a = mul(8, size)                        total = sum(mask)
    total = sum(mask)              ->       a = mul(8, size)
    all = eq(total, a)                      all = eq(total, a)
"""

from __future__ import annotations

from torch import SymBool, SymFloat, SymInt
from torch.fx import GraphModule, Node

from partita.graph.effect_rules.function_tables import OPERATORS

__all__ = ["order_sizes"]


def order_sizes(gm: GraphModule) -> None:
    """Move the arithmetic of open sizes, in place, to where it is used first. What nothing uses stays."""
    placed: set[Node] = set()
    for node in list(gm.graph.nodes):
        if not _is_arithmetic(node):
            _place_operands(node, placed)
    if placed:
        gm.recompile()


def _place_operands(node: Node, placed: set[Node]) -> None:
    for operand in node.all_input_nodes:
        if operand not in placed and _is_arithmetic(operand):
            placed.add(operand)
            node.prepend(operand)
            _place_operands(operand, placed)


def _is_arithmetic(node: Node) -> bool:
    """Whether a node computes a number from numbers; it writes to nothing, wherever it stands."""
    number = isinstance(node.meta.get("val"), (SymInt, SymFloat, SymBool, int, float, bool))
    return number and node.op == "call_function" and node.target in OPERATORS
