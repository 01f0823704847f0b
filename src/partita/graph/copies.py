"""Copies of a node for the parts of a graph that work out its value themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.fx import Node

__all__ = ["copies_for", "users_by_part"]


def users_by_part(node: Node, part_of: Callable[[Node], int | None]) -> dict[int, list[Node]]:
    """The users of a node by the part of the graph that they are in; those that are in none are left out,
    such as what the graph returns.
    """
    users: dict[int, list[Node]] = {}
    for user in node.users:
        part = part_of(user)
        if part is not None:
            users.setdefault(part, []).append(user)
    return users


def copies_for(node: Node, users: Mapping[int, Sequence[Node]]) -> dict[int, Node]:
    """Put a copy of a node behind it for the users of each part, which use that from then on."""
    copies: dict[int, Node] = {}
    for part, of_part in users.items():
        with node.graph.inserting_after(node):
            copies[part] = node.graph.node_copy(node)
        for user in of_part:
            user.replace_input_with(node, copies[part])
    return copies
