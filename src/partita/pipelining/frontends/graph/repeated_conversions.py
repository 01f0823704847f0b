"""Conversions that change nothing, which each stage makes itself.

Eager mode returns the operand, and autograd adds up the gradients of both in the order of their uses. Two
values that cross would have two sums, and other last bits; one is sent in place of two::

    stage 0   h ──┬── float ──┐                  stage 0   h
                  │           │
    stage 1     linear       mul        -->      stage 1   h ──┬── linear
                                                               └── float ── mul
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from partita.graph.conversions import returns_its_operand
from partita.graph.copies import copies_for, users_by_part
from partita.graph.effects import analyse
from partita.graph.levels import inside_levels

__all__ = ["repeat_conversions"]


def repeat_conversions(whole: GraphModule, assignment: dict[str, int]) -> None:
    """Give later stages conversions of their own, in place, where these change nothing on the example. What
    somebody writes to is left as it is, and what the model returns is sent.

    Args:
        assignment: the stage of each node that computes; it is changed, and the copies are added.
    """

    def stage_of(node: Node) -> int | None:
        return assignment.get(node.name)

    if not any(
        users_by_part(node, stage_of).keys() - {stage_of(node)}
        for node in whole.graph.nodes
        if returns_its_operand(node)
    ):
        return
    effects, inside = analyse(whole), inside_levels(whole)
    for position, node in reversed(list(enumerate(effects.nodes))):
        if not returns_its_operand(node) or position in inside or node.name not in assignment:
            continue
        if effects.written and not effects.written.isdisjoint(effects.storages_of([node])):
            continue
        users = users_by_part(node, stage_of)
        users.pop(assignment[node.name], None)
        assignment.update({copied.name: stage for stage, copied in copies_for(node, users).items()})
        if users and not node.users:
            whole.graph.erase_node(node)
            del assignment[node.name]
    whole.graph.lint()
    whole.recompile()
