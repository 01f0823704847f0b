"""In-place operators as generated code means them.

For ``b = operator.iadd(a, 1)`` torch generates ``a += 1;  b = a``. Where ``a`` is a tensor or a list, this
changes it. Where it is a number or a tuple, it binds the name ``a`` anew, and the nodes behind see that; and
``operator.setitem`` has its first operand as its value. An interpreter of the graph sees neither. A cut
graph must not depend on who runs it, so its nodes refer to the value that the generated code gives them::

    b = iadd(a, 1)                     b = iadd(a, 1)
    c = mul(a, 2)                      c = mul(b, 2)
    d = setitem(x, 0, 1)               d = setitem(x, 0, 1)
    e = sin(d)                         e = sin(x)
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.graph_module.nodes import append_copy, copy_codegen, map_arguments, new_graph, same_module
from partita.graph.effects import metadata
from partita.graph.functions import is_tensor
from partita.splitter.assignment import Assignment, is_assignable

__all__ = ["make_rebinding_explicit"]

_REBINDING: tuple[Any, ...] = (
    operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imod, operator.imul,
    operator.imatmul, operator.ior, operator.ipow, operator.irshift, operator.isub, operator.itruediv,
    operator.ixor,
)  # fmt: skip


def make_rebinding_explicit(gm: GraphModule, assignment: Assignment) -> tuple[GraphModule, Assignment]:
    """``gm`` and ``assignment`` as they are, or, where names are bound anew, a module with the same
    attributes and a graph that says so, and the assignment for its nodes.
    """
    found = (
        node
        for target in (*_REBINDING, operator.setitem)
        for node in gm.graph.find_nodes(op="call_function", target=target, sort=False)
    )
    if not any(map(_rebinds, found)):
        return gm, assignment
    nodes = list(gm.graph.nodes)
    graph = new_graph(gm.graph)
    copy_codegen(gm.graph, graph)
    environment: dict[Node, Node] = {}

    def find(node: Node) -> Node:
        return environment.get(node, node)  # a malformed graph is refused later

    for node in nodes:
        copy = append_copy(graph, node, map_arguments(node.args, find), map_arguments(node.kwargs, find))
        environment[node] = copy
        if _rebinds(node):
            first = node.args[0]
            assert isinstance(first, Node)
            if node.target is operator.setitem:
                environment[node] = find(first)
            else:
                environment[first] = copy
    return same_module(gm, graph), _by_name(assignment, nodes)


def _rebinds(node: Node) -> bool:
    """Whether some node sees another value than the one that it refers to."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is operator.setitem:
        return bool(node.users)
    if not any(node.target is target for target in _REBINDING):
        return False
    return not _is_mutable(node.args[0]) and any(node < user for user in node.args[0].users)


def _is_mutable(node: Node) -> bool:
    """Whether a node's value is certainly a tensor, and no number."""
    known = metadata(node)
    computed = getattr(node.target, "__module__", None) == "_operator"
    return isinstance(known, torch.Tensor) or (known is None and not computed and is_tensor(node))


def _by_name(assignment: Assignment, nodes: list[Node]) -> Assignment:
    """The assignment by names of nodes; nodes that are not of this graph stay, to be refused."""
    if not isinstance(assignment, Mapping):
        if not callable(assignment):
            return assignment
        return {node.name: assignment(node) for node in nodes if is_assignable(node)}
    own = set(nodes)
    named: dict[Any, Hashable] = {
        key.name if isinstance(key, Node) and key in own else key: value for key, value in assignment.items()
    }
    return named
