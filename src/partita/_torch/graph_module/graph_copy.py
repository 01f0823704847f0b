"""A copy of a graph that shares nothing that changes."""

from __future__ import annotations

import copy

from torch.fx import Graph, Node
from torch.fx.node import map_arg

__all__ = ["copy_graph"]


def copy_graph(graph: Graph) -> Graph:
    """All nodes with their names, shallow copies of their metadata, and the way in which inputs are
    flattened.

    ``copy.deepcopy`` of a graph also copies the structure of its inputs, which never changes.
    """
    result = Graph(tracer_cls=graph._tracer_cls, tracer_extras=graph._tracer_extras)
    result._codegen = copy.copy(graph._codegen)
    environment: dict[Node, Node] = {}
    for node in graph.nodes:
        environment[node] = (
            result.node_copy(node, environment.__getitem__)
            if node.op != "output"
            else _output(result, node, environment)
        )
    return result


def _output(result: Graph, node: Node, environment: dict[Node, Node]) -> Node:
    made = result.output(map_arg(node.args[0], environment.__getitem__), node.type)
    made.meta = copy.copy(node.meta)
    return made
