from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import torch
from torch import nn

from partita._torch.compile.aot import AotGraph, compile_ahead


def compiled_by(graphs: list[AotGraph], function: Any) -> Any:
    """Compiled by a backend that runs graphs as they are, and keeps their records."""

    def keep(graph: AotGraph) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph.gm

    return torch.compile(function, backend=lambda gm, inputs: compile_ahead(gm, inputs, keep))


def test_each_graph_has_a_record_and_parameters_are_static() -> None:
    graphs: list[AotGraph] = []
    model, x = nn.Linear(2, 3), torch.ones(4, 2)
    compiled = compiled_by(graphs, model)
    compiled(x).sum().backward()
    assert torch.equal(model.bias.grad, torch.full((3,), 4.0))
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    forward, backward, inference = graphs
    assert [graph.kind for graph in graphs] == ["forward", "backward", "inference"]
    assert [len(graph.static_inputs) for graph in graphs] == [2, 0, 2]
    assert forward.forward_tensors == backward.forward_tensors == inference.forward_tensors == (0, 1, 2)
    assert [value.shape for value in forward.examples] == [(3, 2), (3,), (4, 2)]


def test_a_later_backward_pass_may_keep_its_graph() -> None:
    """Torch refused it, "compiled with non-empty donated buffers": it takes a list that was left out for one
    that is not empty.
    """
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.ones(4, 2)
    compiled = compiled_by([], model)
    compiled(x).sum().backward()
    first = model[0].weight.grad.clone()
    loss = compiled(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(model[0].weight.grad, first + first + first)


class TransposedNorm(nn.Module):
    """Its results are laid out as example values do not say, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x.transpose(1, 2)).transpose(1, 2)
        dropped = torch.dropout(normed.reshape(-1, 8).reshape(x.shape).transpose(1, 2), 0.5, True)
        return dropped.transpose(1, 2).reshape(-1, 8)


def test_views_of_what_kernels_lay_out_in_another_way_are_copies() -> None:
    model, graphs = TransposedNorm(), list[AotGraph]()
    x = torch.randn(4, 32, 8)
    results = []
    for run in (model, compiled_by(graphs, copy.deepcopy(model))):
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        output = run(leaf)
        output.sin().sum().backward()
        results.append((output, leaf.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert [graph.kind for graph in graphs] == ["forward", "backward"]


def test_what_forward_saves_for_backward_stands_behind_what_it_returns() -> None:
    graphs: list[AotGraph] = []
    x = torch.ones(3, requires_grad=True)
    compiled_by(graphs, lambda x: (x.sin().cos(), x + 1))(x)
    assert graphs[0].returned == 2
    assert len(graphs[0].gm.graph.output_node().args[0]) > 2


def test_a_backward_graph_knows_the_parameters_that_it_reads_and_a_piece_those_of_its_own() -> None:
    graphs: list[AotGraph] = []
    norm = nn.LayerNorm(2)
    compiled_by(graphs, norm)(torch.ones(4, 2, requires_grad=True)).sum().backward()
    backward = graphs[1]
    assert backward.kind == "backward"
    assert len(backward.static_inputs) == 2
    placeholder = torch.fx.GraphModule({}, torch.fx.Graph())
    node = placeholder.graph.placeholder("tangents")
    node.meta["val"] = torch.ones(2)
    placeholder.graph.output((node,))
    piece = backward.piece(placeholder)
    assert (piece.kind, piece.static_inputs, piece.returned) == ("backward", frozenset(), None)
    assert [value.shape for value in piece.examples] == [(2,)]


def test_what_is_compiled_keeps_no_graph_that_it_does_not_run() -> None:
    """The traced forward graph, and its example values, lived as long as the compiled function."""
    graphs: list[weakref.ref[torch.fx.GraphModule]] = []

    def rewritten(graph: AotGraph) -> Any:
        graphs.append(weakref.ref(graph.gm))
        return torch.fx.GraphModule(graph.gm, copy.deepcopy(graph.gm.graph))

    model = nn.Linear(2, 3)
    compiled = torch.compile(model, backend=lambda gm, inputs: compile_ahead(gm, inputs, rewritten))
    compiled(torch.ones(4, 2)).sum().backward()
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]
