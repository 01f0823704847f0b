"""Building fx graphs quickly, and what torch knows about a node's value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen

from partita._torch.lazy_module import LazyGraphModule, lazy_module

__all__ = [
    "LazyGraphModule",
    "append_copy",
    "append_renamed",
    "copy_codegen",
    "free_symbols",
    "lazy_module",
    "map_arguments",
    "signature_text",
    "symbolic_text",
]

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


def append_renamed(graph: Graph, node: Node, args: Any, kwargs: Any, target: Any) -> Node:
    """Like `append_copy`, with a name made from ``target`` as ``Graph.create_node`` makes it, and not that of ``node``."""
    copy = graph.create_node(node.op, target, args, kwargs, type_expr=node.type)
    copy.meta = node.meta.copy()
    return copy


def copy_codegen(source: Graph, destination: Graph) -> None:
    """Let ``destination`` flatten its inputs and outputs, and bind its arguments, as ``source`` does."""
    destination._codegen = source._codegen
    destination._tracer_cls = source._tracer_cls
    destination._tracer_extras = source._tracer_extras


def free_symbols(value: Any) -> list[Any]:
    """The symbols in the sizes, strides and offset of a fake tensor, or in a symbolic number (nested values too), by name."""
    found = _free_symbols(value)
    return sorted(found, key=str) if found else []


def _free_symbols(value: Any) -> frozenset[Any]:
    if isinstance(value, (list, tuple)):
        return frozenset().union(*(_free_symbols(item) for item in value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return frozenset(value.node.expr.free_symbols)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return frozenset()
    found: set[Any] = set()
    for number in (*value.shape, *value.stride(), value.storage_offset()):
        if isinstance(number, torch.SymInt):
            found |= number.node.expr.free_symbols
    return frozenset(found)


def symbolic_text(value: Any, numbers: dict[Any, int]) -> str:
    """A symbolic number as text, its symbols called after their first appearance and not by name.

    Args:
        numbers: of the symbols met so far; new ones are added.
    """
    expression = value.node.expr
    for symbol in sorted(expression.free_symbols, key=str):
        numbers.setdefault(symbol, len(numbers))
    return str(expression.xreplace({symbol: type(symbol)(f"d{numbers[symbol]}") for symbol in expression.free_symbols}))


def signature_text(graph: Graph) -> str:
    """How a graph flattens what it is called with, as text; empty where it takes its placeholders as they are."""
    info = getattr(graph._codegen, "pytree_info", None)
    kind = type(graph._codegen)
    return "" if kind is CodeGen else f"{kind.__module__}.{kind.__qualname__} {info}"
