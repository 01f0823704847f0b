"""Building fx graphs quickly, and graph modules whose code is generated on the first run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = ["LazyGraphModule", "append_copy", "copy_codegen", "free_symbols", "lint_names", "map_arguments"]

map_arguments: Callable[[Any, Callable[[Node], Any]], Any] = torch.fx.node.map_arg


def append_copy(graph: Graph, node: Node, args: Any, kwargs: Any) -> Node:
    """Append a copy of ``node`` (name, operator, target, type, a shallow copy of its meta) with other arguments.

    Does what ``Graph.node_copy`` does but for the search for a free name where the name is free already (names are unique in
    the graph that it comes from), and the check for raw symbolic values (the original passed it): about half the time.

    Args:
        args: nodes of ``graph`` and constants, as ``map_arguments`` returns them.
    """
    namespace = graph._graph_namespace
    name = node.name
    if name in namespace._used_names:
        name = namespace.create_name(name, None)
    else:
        namespace._used_names.add(name)
    copy = Node(graph, name, node.op, node.target, args, kwargs, node.type)
    namespace._obj_to_name[copy] = name
    graph._insert(copy)
    graph._find_nodes_lookup_table.insert(copy)
    graph._len += 1
    copy.meta = node.meta.copy()
    return copy


def copy_codegen(source: Graph, destination: Graph) -> None:
    """Let ``destination`` flatten its inputs and outputs, and bind its arguments, as ``source`` does."""
    destination._codegen = source._codegen
    destination._tracer_cls = source._tracer_cls
    destination._tracer_extras = source._tracer_extras


def free_symbols(value: Any) -> frozenset[Any]:
    """The symbols in the sizes, strides and offset of a fake tensor, or in a symbolic number (nested values too)."""
    if isinstance(value, (list, tuple)):
        return frozenset().union(*(free_symbols(item) for item in value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return frozenset(value.node.expr.free_symbols)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return frozenset()
    found: set[Any] = set()
    for number in (*value.shape, *value.stride(), value.storage_offset()):
        if isinstance(number, torch.SymInt):
            found |= number.node.expr.free_symbols
    return frozenset(found)


def lint_names(graph: Graph) -> None:
    """``Graph.lint`` (raises RuntimeError or AssertionError where the graph is malformed)."""
    graph.lint()


class LazyGraphModule(_LazyGraphModule):
    """A ``GraphModule`` that generates its code when it is first run, printed, pickled or compiled.

    Everything else is as in ``GraphModule``. torch itself knows its base class and forces the code where it needs it.
    """
