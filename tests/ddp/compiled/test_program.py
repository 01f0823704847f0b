"""Backward graphs are cut after each bucket, and hand their gradients out early."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from partita.ddp.compiled.cutting import BackwardGraph, cut_backward
from partita.ddp.compiled.program import program_of


def backward_graph() -> GraphModule:
    """Three gradients; a transposed weight that only the last one needs stands first."""
    graph = Graph()
    weight, tangent = graph.placeholder("weight"), graph.placeholder("tangent")
    turned = graph.call_function(torch.ops.aten.t.default, (weight,))
    third = graph.call_function(torch.ops.aten.sin.default, (tangent,))
    middle = graph.call_function(torch.ops.aten.cos.default, (third,))
    second = graph.call_function(torch.ops.aten.neg.default, (middle,))
    first = graph.call_function(torch.ops.aten.mm.default, (turned, second))
    graph.output((first, None, second, third, tangent))
    for node in graph.nodes:
        if node.op != "output":
            node.meta["val"] = torch.zeros(2, 2, device="meta")
    return GraphModule(nn.Module(), graph)


def test_a_backward_graph_is_cut_after_each_bucket_and_work_is_done_where_it_is_needed() -> None:
    gm = backward_graph()
    cut = cut_backward(BackwardGraph(gm), {0: "late", 2: "middle", 3: "early"})
    assert cut is not None
    assert [piece.node_names for piece in cut.pieces] == [
        ("sin_default",),
        ("cos_default", "neg_default"),
        ("t_default", "mm_default"),
    ]
    assert cut_backward(BackwardGraph(gm), {0: "all", 2: "all", 3: "all"}) is None


def test_gradients_come_out_as_soon_as_their_piece_has_run() -> None:
    gm = backward_graph()
    log: list[Any] = []

    def compile_piece(key: str, piece: GraphModule) -> Any:
        def run(values: list[Any]) -> Any:
            log.append("piece")
            taken = list(values)
            values.clear()
            return piece(*taken)

        return run

    def deliver(position: int, value: torch.Tensor) -> torch.Tensor | None:
        log.append(position)
        return value if position == 0 else None

    x = torch.randn(2, 2)
    expected = gm(x, x)
    for buckets in ({0: 0, 2: 1, 3: 2}, {0: 0}):
        log.clear()
        program = program_of(gm, cut_backward(BackwardGraph(gm), buckets), compile_piece)
        inputs = [x, x]
        results = program.run(inputs, deliver)
        assert not inputs
        assert torch.equal(results[0], expected[0])
        assert results[1:] == [None] * 4
    assert log == [4, "piece", 3, 2, 0]
