"""Graphs to cut, of any number of nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

__all__ = ["SHAPES", "assignment", "chain", "different_chain", "many_inputs", "transformer", "woven_chain"]


def chain(nodes: int, _pieces: int) -> GraphModule:
    """Chain ``nodes`` pointwise operators. Its pieces are equal but for their names."""
    graph = Graph()
    value = graph.placeholder("x")
    for number in range(nodes):
        value = graph.call_function(torch.sin if number % 2 else torch.neg, (value,))
    graph.output(value)
    return GraphModule(nn.Module(), graph)


def different_chain(nodes: int, pieces: int) -> GraphModule:
    """Make the same chain, but each piece adds a number of its own, so that no two are equal."""
    graph = Graph()
    value = graph.placeholder("x")
    length = max(1, nodes // pieces)
    for number in range(nodes):
        if number % length == 0:
            value = graph.call_function(operator.add, (value, float(number)))
        else:
            value = graph.call_function(torch.sin if number % 2 else torch.neg, (value,))
    graph.output(value)
    return GraphModule(nn.Module(), graph)


def woven_chain(nodes: int, pieces: int) -> GraphModule:
    """Make a chain whose pieces differ in operators and arguments: each is woven after its own number."""
    graph = Graph()
    value = earlier = graph.placeholder("x")
    length = max(1, nodes // pieces)
    for number in range(nodes):
        piece, place = divmod(number, length)
        if (piece >> place % 16) & 1 and place:
            value, earlier = graph.call_function(torch.maximum, (value, earlier)), value
        else:
            value, earlier = graph.call_function(torch.sin if number % 2 else torch.neg, (value,)), value
    graph.output(value)
    return GraphModule(nn.Module(), graph)


def many_inputs(nodes: int, _pieces: int) -> GraphModule:
    """Make a graph with one placeholder for each operator."""
    graph = Graph()
    inputs = [graph.placeholder(f"x{number}") for number in range(nodes)]
    value = inputs[0]
    for operand in inputs:
        value = graph.call_function(torch.add, (value, operand))
    graph.output(value)
    return GraphModule(nn.Module(), graph)


def transformer(nodes: int, _pieces: int) -> GraphModule:
    """Make blocks of attention and feed-forward, with residuals and shared weights.

    23 operators and 4 attributes a block; ``x``: (1, 2, 4).
    """
    graph, root = Graph(), nn.Module()
    width = 4
    for name in ("qkv", "out", "up", "down"):
        setattr(root, name, nn.Parameter(torch.eye(width).repeat(3 if name == "qkv" else 1, 1)))
    value = graph.placeholder("x")
    operators = 0
    while operators < nodes:
        value, count = _block(graph, value, width)
        operators += count
    graph.output(value)
    return GraphModule(root, graph)


def _block(graph: Graph, x: Node, width: int) -> tuple[Node, int]:
    before = len(graph.nodes)
    function = torch.nn.functional
    normed = graph.call_function(function.layer_norm, (x, (width,)))
    qkv = graph.call_function(function.linear, (normed, graph.get_attr("qkv", type_expr=None)))
    parts = graph.call_method("chunk", (qkv, 3, -1))
    q, k, v = (graph.call_function(operator.getitem, (parts, number)) for number in range(3))
    heads = [
        graph.call_method("transpose", (graph.call_method("view", (part, 1, 2, 2, 2)), 1, 2))
        for part in (q, k, v)
    ]
    attended = graph.call_function(function.scaled_dot_product_attention, tuple(heads))
    merged = graph.call_method("reshape", (graph.call_method("transpose", (attended, 1, 2)), 1, 2, width))
    x = graph.call_function(
        operator.add, (x, graph.call_function(function.linear, (merged, graph.get_attr("out"))))
    )
    normed = graph.call_function(function.layer_norm, (x, (width,)))
    up = graph.call_function(
        function.gelu, (graph.call_function(function.linear, (normed, graph.get_attr("up"))),)
    )
    x = graph.call_function(
        operator.add, (x, graph.call_function(function.linear, (up, graph.get_attr("down"))))
    )
    return x, len(graph.nodes) - before


SHAPES: dict[str, Callable[[int, int], GraphModule]] = {
    "chain": chain,
    "different": different_chain,
    "inputs": many_inputs,
    "transformer": transformer,
    "woven": woven_chain,
}


def assignment(gm: GraphModule, pieces: int) -> dict[Node, int]:
    """Assign operators to contiguous pieces of equal length."""
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    length = -(-len(nodes) // pieces)
    return {node: position // length for position, node in enumerate(nodes)}
