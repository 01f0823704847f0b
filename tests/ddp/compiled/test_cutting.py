"""Where backward graphs are cut."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from partita.ddp.compiled.cutting import BackwardGraph, cut_backward
from partita.ddp.compiled.program import program_of


def _graph(build: Any) -> BackwardGraph:
    graph = Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return BackwardGraph(GraphModule(torch.nn.Module(), graph))


def _pieces(graph: BackwardGraph, buckets: dict[int, int]) -> list[tuple[str, ...]]:
    cut = cut_backward(graph, buckets)
    assert cut is not None
    return [
        tuple(node.name for node in piece.module.graph.nodes if node.op == "call_function")
        for piece in cut.pieces
    ]


def _results(graph: BackwardGraph, buckets: dict[int, int], *values: torch.Tensor) -> list[Any]:
    program = program_of(graph.gm, cut_backward(graph, buckets), lambda _, gm: lambda inputs: gm(*inputs))
    return program.run(list(values), lambda _, value: value)


def _three(graph: Graph, x: Any) -> tuple[Any, ...]:
    sin = graph.call_function(torch.sin, (x,))
    cos = graph.call_function(torch.cos, (sin,))
    return sin, None, cos, graph.call_function(torch.exp, (cos,))


def test_each_bucket_ends_a_piece() -> None:
    graph = _graph(_three)
    assert graph.in_order({3: "a", 0: "b", 1: "c", 2: "d"}) == [0, 2, 3]
    assert _pieces(graph, {0: 0, 2: 1, 3: 1}) == [("sin",), ("cos", "exp")]
    assert _pieces(graph, {0: 0, 2: 1, 3: 2}) == [("sin",), ("cos",), ("exp",)]
    assert cut_backward(graph, {0: 0, 2: 0, 3: 0}) is None
    x = torch.randn(3)
    for got, expected in zip(_results(graph, {0: 0, 2: 1, 3: 1}, x), graph.gm(x), strict=True):
        assert (got is None and expected is None) or torch.equal(got, expected)


def _variance_and_mean(graph: Graph, x: Any) -> tuple[Any, ...]:
    both = graph.call_function(torch.var_mean, (x,))
    mean = graph.call_function(operator.getitem, (both, 1))
    sin = graph.call_function(torch.sin, (mean,))
    variance = graph.call_function(operator.getitem, (both, 0))
    return mean, sin, variance


def test_results_of_one_operator_stay_with_it() -> None:
    """Compilers hand tensors on, and not the tuple that they are in."""
    graph = _graph(_variance_and_mean)
    for buckets in ({0: 0, 1: 1, 2: 2}, {0: 0, 1: 1, 2: 1}, {1: 0, 2: 1}, {2: 0, 1: 1}):
        cut = cut_backward(graph, buckets)
        if cut is None:
            continue
        assert all(name != "var_mean" for piece in cut.pieces for name in piece.outputs), buckets
        x = torch.randn(3)
        for got, expected in zip(_results(graph, buckets, x), graph.gm(x), strict=True):
            assert torch.equal(got, expected)
    assert _pieces(graph, {0: 0, 1: 1, 2: 2}) == [("var_mean", "getitem", "getitem_1"), ("sin",)]


def _needed_late(graph: Graph, x: Any) -> tuple[Any, ...]:
    again = graph.call_function(torch.exp, (x,))
    sin = graph.call_function(torch.sin, (x,))
    return sin, graph.call_function(torch.mul, (sin, again))


def test_what_is_only_needed_later_is_computed_later() -> None:
    assert _pieces(_graph(_needed_late), {0: 0, 1: 1}) == [("sin",), ("exp", "mul")]
