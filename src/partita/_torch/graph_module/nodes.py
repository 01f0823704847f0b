"""Building fx graphs quickly, and what torch knows about a node's value."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen, _illegal_names, _snake_case

from partita._torch.graph_module.lazy_module import lazy_module

__all__ = [
    "append_copy",
    "append_input",
    "append_renamed",
    "copy_codegen",
    "free_symbols",
    "map_arguments",
    "new_graph",
    "signature_text",
    "symbolic_text",
    "with_graph",
]

map_arguments: Callable[[Any, Callable[[Node], Any]], Any] = torch.fx.node.map_arg


def append_copy(graph: Graph, node: Node, args: Any, kwargs: Any) -> Node:
    """Append a copy of ``node`` (name, operator, target, type, a shallow copy of its meta), other arguments.

    Does what ``Graph.node_copy`` does but for the search for a free name where the name is free already
    (names are unique in the graph that it comes from), and the check for raw symbolic values (the original
    passed it): about half the time.

    Args:
        args: nodes of ``graph`` and constants, as ``map_arguments`` returns them.
    """
    return _append(graph, node, _free(graph, node.name), node.op, node.target, args, kwargs)


def append_input(graph: Graph, node: Node, name: str) -> Node:
    """Append a placeholder called ``name`` for the value of ``node``, with its type and its meta."""
    return _append(graph, node, _free(graph, name), "placeholder", name, (), {})


def append_renamed(graph: Graph, node: Node, args: Any, kwargs: Any, target: Any) -> Node:
    """Like `append_copy`, with a name made from ``target`` as ``Graph.create_node`` makes it."""
    text = target if isinstance(target, str) else getattr(target, "__name__", node.name)
    name = graph._graph_namespace.create_name(_stem(text, isinstance(target, str)), None)
    return _append(graph, node, name, node.op, target, args, kwargs)


def _free(graph: Graph, name: str) -> str:
    """Return ``name``, or one made from it where it is taken or torch would not give it."""
    namespace = graph._graph_namespace
    if name in namespace._used_names or name in _illegal_names:
        return namespace.create_name(name, None)
    namespace._used_names.add(name)
    return name


@lru_cache(maxsize=4096)
def _stem(text: str, is_name: bool) -> str:
    return _ANY_GRAPH._target_to_str(text) if is_name else _snake_case(text)


def _append(graph: Graph, node: Node, name: str, op: str, target: Any, args: Any, kwargs: Any) -> Node:
    copy = Node(graph, name, op, target, args, kwargs, node.type)
    graph._graph_namespace._obj_to_name[copy] = name
    graph._insert(copy)
    graph._find_nodes_lookup_table.insert(copy)
    graph._len += 1
    copy.meta.update(node.meta)  # setting the attribute would look the node up and insert it once more
    return copy


_ANY_GRAPH = Graph()


def new_graph(source: Graph) -> Graph:
    """Return an empty graph of the same tracer as ``source``."""
    return Graph(tracer_cls=source._tracer_cls)


def with_graph(gm: GraphModule, graph: Graph) -> GraphModule:
    """Return a module around another graph that shares the attributes of ``gm``."""
    module = lazy_module(graph, type(gm).__name__, training=gm.training)
    vars(module).update({key: value for key, value in vars(gm).items() if key != "_graph"})
    return module


def copy_codegen(source: Graph, destination: Graph) -> None:
    """Let ``destination`` flatten its inputs and outputs, and bind its arguments, as ``source`` does."""
    destination._codegen = source._codegen
    destination._tracer_cls = source._tracer_cls
    destination._tracer_extras = source._tracer_extras


def free_symbols(value: Any) -> list[Any]:
    """Return the symbols in the sizes, strides and offset of a fake tensor, or in a symbolic number (also of
    nested values), sorted by name.
    """
    symbols = _free_symbols(value)
    return sorted(symbols, key=str) if symbols else []


def _free_symbols(value: Any) -> frozenset[Any]:
    if isinstance(value, (list, tuple)):
        return frozenset().union(*(_free_symbols(item) for item in value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return frozenset(value.node.expr.free_symbols)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return frozenset()
    symbols: set[Any] = set()
    for number in (*value.shape, *value.stride(), value.storage_offset()):
        if isinstance(number, torch.SymInt):
            symbols |= number.node.expr.free_symbols
    return frozenset(symbols)


def symbolic_text(value: Any, numbers: dict[Any, int]) -> str:
    """Return a symbolic number as text in which symbols are numbered by their first appearance, not named.

    Args:
        numbers: those of the symbols met so far; new ones are added.
    """
    expression = value.node.expr
    for symbol in sorted(expression.free_symbols, key=str):
        numbers.setdefault(symbol, len(numbers))
    return str(
        expression.xreplace(
            {symbol: type(symbol)(f"d{numbers[symbol]}") for symbol in expression.free_symbols}
        )
    )


def signature_text(graph: Graph) -> str:
    """Return how a graph flattens its arguments, as text; empty where it takes one a placeholder."""
    info = getattr(graph._codegen, "pytree_info", None)
    kind = type(graph._codegen)
    return "" if kind is CodeGen else f"{kind.__module__}.{kind.__qualname__} {info}"
