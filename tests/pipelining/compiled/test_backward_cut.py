"""I and W together compute what the backward graph computes, and little is kept between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from partita.pipelining.compiled.backward_cut import INPUTS, WEIGHTS, BackwardCut, cut_backward

aten = torch.ops.aten


def _traced(function: Any, *args: Any) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def _in_halves(cut: BackwardCut, args: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Every value that the pieces take and make; W is given only what it says that it takes."""
    names = [node.name for node in cut.whole.graph.find_nodes(op="placeholder")]
    values = dict(zip(names, args, strict=True))
    for key in (INPUTS, WEIGHTS):
        piece = cut.pieces.get(key)
        if piece is not None:
            made = piece.module(*(values[name] for name in piece.inputs))
            values.update(zip(piece.outputs, made, strict=True))
    return values


def _linear(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return aten.mm(g, w), aten.mm(aten.t(g), x)


def test_both_halves_compute_what_the_whole_does() -> None:
    args = torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 5)
    gm = _traced(_linear, *args)
    cut = cut_backward(gm, {0})
    assert cut.pieces[INPUTS].outputs == (cut.outputs[0],)
    assert cut.pieces[WEIGHTS].outputs == (cut.outputs[1],)
    values = _in_halves(cut, args)
    for name, expected in zip(cut.outputs, gm(*args), strict=True):
        assert torch.equal(values[name], expected)


def test_without_a_gradient_for_i_all_is_in_w_and_the_other_way_round() -> None:
    gm = _traced(_linear, torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 5))
    assert list(cut_backward(gm, set()).pieces) == [WEIGHTS]
    assert list(cut_backward(gm, {0, 1}).pieces) == [INPUTS]


def test_what_computes_gradients_of_both_is_asked_by_each_for_its_own() -> None:
    def backward(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gx, gw, gb = aten.convolution_backward(
            g, x, w, [2], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        )
        return gx, gw, gb

    args = torch.randn(1, 3, 5, 5), torch.randn(2, 3, 3, 3), torch.randn(1, 2, 5, 5)
    gm = _traced(backward, *args)
    cut = cut_backward(gm, {0})
    masks = [
        piece.module.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)[0].args[
            -1
        ]
        for piece in (cut.pieces[INPUTS], cut.pieces[WEIGHTS])
    ]
    assert masks == [[True, False, False], [False, True, True]]
    assert "w_1" not in cut.pieces[WEIGHTS].inputs  # whose shape is enough for its gradient
    values = _in_halves(cut, args)
    for name, expected in zip(cut.outputs, gm(*args), strict=True):
        assert torch.equal(values[name], expected)


def test_a_batch_normalisation_is_not_asked_in_part() -> None:
    """It takes as long for the gradient of the input as for all."""

    def backward(g: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Any, ...]:
        mask = [True, True, True]
        return tuple(aten.native_batch_norm_backward(g, x, w, None, None, mean, rstd, True, 1e-5, mask))

    x, w = torch.randn(2, 4, 3, 3), torch.randn(4)
    _, mean, rstd = aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5)
    cut = cut_backward(_traced(backward, torch.randn_like(x), x, w, mean, rstd), {0})
    assert list(cut.pieces) == [INPUTS]


def test_a_group_normalisation_is_not_asked_in_part() -> None:
    """Asked for the gradients of weights alone, torch's crashes the process."""

    def backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> tuple[Any, ...]:
        return tuple(aten.native_group_norm_backward(g, x, mean, rstd, w, 2, 4, 9, 2, [True, True, True]))

    x, w = torch.randn(2, 4, 3, 3), torch.randn(4)
    _, mean, rstd = aten.native_group_norm(x, w, w, 2, 4, 9, 2, 1e-5)
    cut = cut_backward(_traced(backward, torch.randn_like(x), x, mean, rstd, w), {0})
    assert list(cut.pieces) == [INPUTS]


def test_a_cast_is_repeated_where_what_it_is_made_from_is_smaller() -> None:
    def backward(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.to(torch.float32)
        return aten.mm(g, w) * wide.sum(), aten.mm(aten.t(g), wide)

    args = torch.randn(3, 4).bfloat16(), torch.randn(5, 4), torch.randn(3, 5)
    cut = cut_backward(_traced(backward, *args), {0})
    assert set(cut.pieces[WEIGHTS].inputs) == {"x_1", "g_1"}


def test_an_elementwise_result_is_repeated_only_where_that_costs_nothing() -> None:
    def backward(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = g * x
        return aten.mm(h, w), aten.mm(aten.t(h), x), aten.sum(g)

    gm = _traced(backward, torch.randn(3, 4), torch.randn(4, 4), torch.randn(3, 4))
    assert len(cut_backward(gm, {0}).pieces[WEIGHTS].inputs) == 3
    fused = cut_backward(gm, {0}, fuses=True).pieces[WEIGHTS]
    assert set(fused.inputs) == {"x_1", "g_1"}


def test_of_two_ways_that_keep_as_much_w_repeats_less() -> None:
    def backward(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        h = (aten.mm(g, w) * 2).tanh()
        return aten.mm(h, w), aten.mm(aten.t(h), x)

    gm = _traced(backward, torch.randn(3, 4), torch.randn(4, 4), torch.randn(3, 4))
    nodes = cut_backward(gm, {0}, fuses=True).pieces[WEIGHTS].module.graph.nodes
    assert [node.target for node in nodes if node.op == "call_function"] == [aten.t.default, aten.mm.default]
    assert all(node.users for node in nodes if node.op != "output")


def test_what_has_several_results_is_not_repeated() -> None:
    def backward(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        values, places = aten.sort(g)
        return aten.mm(values, w), aten.mm(aten.t(values), x) * places

    gm = _traced(backward, torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4))
    second = cut_backward(gm, {0}, fuses=True).pieces[WEIGHTS]
    assert not second.module.graph.find_nodes(op="call_function", target=aten.sort.default)


def test_what_draws_random_numbers_runs_in_i() -> None:
    def backward(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return aten.mm(g, w), aten.mm(aten.t(g), x * aten.rand_like(x))

    cut = cut_backward(_traced(backward, torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 5)), {0})
    drawing = [key for key, piece in cut.pieces.items() if any("rand" in name for name in piece.node_names)]
    assert drawing == [INPUTS]
