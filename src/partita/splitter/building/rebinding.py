"""In-place operators with the meaning that they have in generated code.

For ``b = operator.iadd(a, 1)`` torch generates ``a += 1;  b = a``. Where ``a`` is a tensor or a list, this
changes it. Where it is a number or a tuple, it binds the name ``a`` anew, and later nodes that use ``a`` get
the new value; and ``operator.setitem`` returns its first operand. An interpreter of the graph does neither. A
cut graph must mean the same to both, so its nodes refer to the value that the generated code gives them::

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

from partita._torch.graph_module.nodes import append_copy, copy_codegen, map_arguments, new_graph, with_graph
from partita.graph.effect_rules.function_tables import AUGMENTED_ASSIGNMENTS
from partita.graph.effect_rules.functions import is_tensor
from partita.graph.effects import metadata
from partita.splitter.decisions.assignment import Assignment, is_assignable

__all__ = ["make_rebinding_explicit"]


def make_rebinding_explicit(gm: GraphModule, assignment: Assignment) -> tuple[GraphModule, Assignment]:
    """Return ``gm`` and ``assignment``, or equivalents whose nodes refer to the values of the generated code.

    The equivalent module has the same attributes and another graph; its assignment is by names.
    """
    candidates = (
        node
        for target in (*AUGMENTED_ASSIGNMENTS, operator.setitem)
        for node in gm.graph.find_nodes(op="call_function", target=target, sort=False)
    )
    if not any(map(_rebinds, candidates)):
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
    return with_graph(gm, graph), _by_name(assignment, nodes)


def _rebinds(node: Node) -> bool:
    """Whether generated code gives some user of the node, or of its first operand, another value."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is operator.setitem:
        return bool(node.users)
    if not any(node.target is target for target in AUGMENTED_ASSIGNMENTS):
        return False
    return not _is_mutable(node.args[0]) and any(node < user for user in node.args[0].users)


def _is_mutable(node: Node) -> bool:
    """Whether a node's value is certainly a tensor, and no number."""
    example = metadata(node)
    computed = getattr(node.target, "__module__", None) == "_operator"
    return isinstance(example, torch.Tensor) or (example is None and not computed and is_tensor(node))


def _by_name(assignment: Assignment, nodes: list[Node]) -> Assignment:
    """The assignment by names of nodes; nodes of other graphs stay as they are, to be refused later."""
    if not isinstance(assignment, Mapping):
        if not callable(assignment):
            return assignment
        return {node.name: assignment(node) for node in nodes if is_assignable(node)}
    own = set(nodes)
    named: dict[Any, Hashable] = {
        key.name if isinstance(key, Node) and key in own else key: value for key, value in assignment.items()
    }
    return named
