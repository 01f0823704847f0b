"""The assignment of nodes to pieces, as the caller gives it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from partita.errors import AssignmentError
from partita.listing import listed

__all__ = ["Assignment", "assigned_keys", "is_assignable"]

Assignment = Callable[[Node], Hashable] | Mapping[Node, Hashable] | Mapping[str, Hashable]
"""A function from a node to the key of its piece, or a mapping from nodes or their names to keys."""

_NEVER = frozenset({"placeholder", "get_attr", "output"})


def is_assignable(node: Node) -> bool:
    """Return whether a node is assigned to a piece; where the others go follows from their users."""
    return node.op not in _NEVER


def assigned_keys(assignment: Assignment, nodes: Sequence[Node], switches: Sequence[int]) -> list[Any]:
    """Return the key of each node by position, `None` for those that are not assigned.

    A function is called once for each assignable node in graph order, including those that switch a grad or
    autocast region, so that it may count. The key of a switch is ignored; a mapping may leave switches out.

    Raises:
        AssignmentError: a node without a key, a name that is no node of the graph, a key that can't be
            hashed.
    """
    if isinstance(assignment, Mapping):
        return _from_mapping(assignment, nodes, frozenset(switches))
    if not callable(assignment):
        raise AssignmentError(
            f"an assignment is a function or a mapping, got {type(assignment).__name__}: pass a function "
            "from a node to the key of its piece, or a dict from node (or node name) to key"
        )
    return [_checked(assignment(node), node) if is_assignable(node) else None for node in nodes]


def _from_mapping(
    assignment: Mapping[Any, Hashable], nodes: Sequence[Node], switches: frozenset[int]
) -> list[Any]:
    named: dict[str, Any] = {}
    for name, key in assignment.items():
        if not isinstance(name, (str, Node)):
            raise AssignmentError(
                f"an assignment maps nodes or node names to keys, got {name!r} of type {type(name).__name__}"
            )
        named[name if isinstance(name, str) else name.name] = key
    in_graph = {node.name for node in nodes}
    foreign = [name for name in named if name not in in_graph]
    foreign += [
        name.name for name in assignment if isinstance(name, Node) and name.graph is not nodes[0].graph
    ]
    if foreign:
        raise AssignmentError(
            f"the assignment names {listed(foreign)}, which the graph does not have: use the names of "
            "graph.nodes (print(gm.graph) shows them)"
        )
    missing = [
        node.name
        for position, node in enumerate(nodes)
        if is_assignable(node) and node.name not in named and position not in switches
    ]
    if missing:
        raise AssignmentError(
            f"the assignment has no key for {listed(missing)}: give every node a key but placeholders, "
            "get_attr and output"
        )
    return [
        _checked(named[node.name], node) if is_assignable(node) and node.name in named else None
        for node in nodes
    ]


def _checked(key: Any, node: Node) -> Any:
    if key is None:
        raise AssignmentError(
            f"the assignment returns None for node {node.name!r}: return a key (an int or a str) for every "
            "node"
        )
    try:
        hash(key)
    except TypeError:
        raise AssignmentError(
            f"the assignment returns {key!r} for node {node.name!r}, a {type(key).__name__}, which can't be "
            "hashed: return an int, a str or a tuple"
        ) from None
    return key
