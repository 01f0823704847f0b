"""Conversions that change nothing, which each stage makes itself.

Eager mode returns the operand, and autograd adds up the gradients of both in the order of their uses. Two
values that cross would have two sums, and other last bits; one is sent in place of two::

    stage 0   h ──┬── float ──┐                  stage 0   h
                  │           │
    stage 1     linear       mul        -->      stage 1   h ──┬── linear
                                                               └── float ── mul
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from partita.graph.conversions import returns_its_operand
from partita.graph.effects import analyse
from partita.graph.levels import inside_levels

__all__ = ["repeat_conversions"]


def repeat_conversions(whole: GraphModule, assignment: dict[str, int]) -> None:
    """Give later stages conversions of their own, in place, where these change nothing on the example. What
    somebody writes to is left as it is, and what the model returns is sent.

    Args:
        assignment: the stage of each node that computes; it is changed, and the copies are added.
    """
    if not any(
        _users_by_stage(node, assignment).keys() - {assignment.get(node.name)}
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
        users = _users_by_stage(node, assignment)
        users.pop(assignment[node.name], None)
        for stage, of_stage in users.items():
            with whole.graph.inserting_after(node):
                copied = whole.graph.node_copy(node)
            assignment[copied.name] = stage
            for user in of_stage:
                user.replace_input_with(node, copied)
        if users and not node.users:
            whole.graph.erase_node(node)
            del assignment[node.name]
    whole.graph.lint()
    whole.recompile()


def _users_by_stage(node: Node, assignment: Mapping[str, int]) -> dict[int, list[Node]]:
    users: dict[int, list[Node]] = {}
    for user in node.users:
        if user.name in assignment:  # and not what the model returns
            users.setdefault(assignment[user.name], []).append(user)
    return users
