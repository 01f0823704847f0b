from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

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


@torch.library.custom_op("partita_test_aot::in_plain_order", mutates_args=())
def in_plain_order(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous()
    return x * 2


in_plain_order.register_fake(torch.empty_like)
in_plain_order.register_autograd(lambda _, gradient: in_plain_order(gradient.contiguous()))


@pytest.mark.parametrize(
    ("function", "by_operator", "strides"),
    [
        (torch.cos, True, [(1, 4)]),
        (torch.cos, False, [(3, 1)]),  # a compiler may count on it
        (in_plain_order, True, [(3, 1)]),
        (lambda x: x.cos().as_strided((4, 3), (3, 1)), True, [(3, 1)]),
    ],
    ids=["operators", "a compiler", "a user's operator", "strides"],
)
def test_a_gradient_is_taken_as_it_lies_where_that_matters_for_last_bits_alone(
    function: Any, by_operator: bool, strides: list[tuple[int, ...]]
) -> None:
    """AOTAutograd copied it into the layout of the output, which has other last bits."""
    arrived = list[tuple[int, ...]]()

    def keep(graph: AotGraph) -> Any:
        def run(*values: torch.Tensor) -> Any:
            if graph.kind == "backward":
                arrived.append(values[-1].stride())
            return graph.gm(*values)

        return run

    compiled = torch.compile(
        function, backend=lambda gm, inputs: compile_ahead(gm, inputs, keep, by_operator=by_operator)
    )
    x, gradient = torch.randn(4, 3, requires_grad=True), torch.randn(3, 4).t()
    compiled(x).backward(gradient)
    assert arrived == strides
    (expected,) = torch.autograd.grad(function(x), x, gradient)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: functional.group_norm(x, 2), (2, 4, 3, 3)),
        (lambda x: functional.group_norm(x.to(memory_format=torch.channels_last), 2), (2, 4, 3, 3)),
        (lambda x: torch._weight_norm(x, torch.ones(8, 1), 0), (8, 6)),
        (lambda x: torch.view_as_real(torch.fft.fft(x)), (4, 4)),
        (lambda x: torch.cdist(x, torch.ones(7, 3)), (5, 3)),
        (lambda x: functional.interpolate(x, scale_factor=2), (2, 4, 6, 6)),
    ],
    ids=["group norm", "channels last", "weight norm", "complex", "distances", "interpolation"],
)
def test_what_kernels_need_in_plain_order_is_laid_out_before(function: Any, shape: tuple[int, ...]) -> None:
    """Torch's formulas do so, which a trace does not show; the kernels read other numbers."""
    compiled = torch.compile(
        function, backend=lambda gm, inputs: compile_ahead(gm, inputs, lambda it: it.gm, by_operator=True)
    )
    x = torch.randn(shape, requires_grad=True)
    gradient = torch.randn_like(function(x).mT.contiguous()).mT
    (expected,) = torch.autograd.grad(function(x), x, gradient)
    compiled(x).backward(gradient)
    assert torch.equal(x.grad, expected)


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
