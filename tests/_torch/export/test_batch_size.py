from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from partita._torch.compile.aot import AotGraph, compile_ahead
from partita._torch.export.batch_size import BatchSize, find_batch


def graph_of(function: Any, *inputs: torch.Tensor, dynamic: bool = True) -> GraphModule:
    seen: list[GraphModule] = []

    def keep(graph: AotGraph) -> GraphModule:
        seen.append(graph.gm)
        return graph.gm

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return compile_ahead(gm, inputs, keep)

    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return seen[0]


def test_sizes_are_multiples_of_the_batch_or_not() -> None:
    gm = graph_of(lambda x: x.view(-1).sin(), torch.ones(5, 3))
    batch = find_batch(gm)
    assert isinstance(batch, BatchSize)
    flat = gm.graph.output_node().args[0][0].meta["val"].shape[0]
    rows = next(node.meta["val"] for node in gm.graph.find_nodes(op="placeholder") if "val" in node.meta)
    assert batch.within(flat)
    assert not batch.within(7)
    assert batch.factor(7) is None or not batch.within(7)
    assert batch.product([batch.factor(flat), rows if isinstance(rows, torch.SymInt) else rows.shape[0]])
    others = {
        node.meta["val"].node.expr: 3
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.SymInt) and node.meta["val"].node.expr != batch.symbol
    }
    assert batch.at(flat, 10, others) == 30


def test_a_size_that_a_guard_excludes_is_not_allowed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.shape[0] < 10 else x.cos()

    batch = find_batch(graph_of(function, torch.ones(5, 3)))
    assert isinstance(batch, BatchSize)
    assert batch.allows(8)
    assert not batch.allows(16)


def test_fixed_sizes_and_independent_ones_have_no_batch() -> None:
    assert "compile with dynamic=True" in str(
        find_batch(graph_of(torch.sin, torch.ones(5, 3), dynamic=False))
    )
    batch = find_batch(graph_of(lambda x, y: (x.sin(), y.cos()), torch.ones(5, 3), torch.ones(6, 3)))
    assert "independent of each other" in str(batch)
