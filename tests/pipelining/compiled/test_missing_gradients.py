"""A backward graph without the gradients of some outputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from partita.pipelining.compiled.missing_gradients import without_gradients

aten = torch.ops.aten


def _backward(w: Tensor, g0: Tensor, g1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return aten.add(aten.mm(g0, w), aten.mm(g1, w)), aten.sum(g1), aten.cat([g0, g1])


def _without(missing: str) -> tuple[list[str], tuple[object, ...], object]:
    args = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3)
    gm = make_fx(_backward, tracing_mode="fake")(*args)
    (given,) = {"g0_1", "g1_1"} - {missing}
    result = without_gradients(gm, [missing], [given])
    names = [node.name for node in result.graph.find_nodes(op="placeholder")]
    return names, result.graph.output_node().args[0], result


def test_what_depends_on_missing_gradients_alone_is_missing() -> None:
    _, outputs, _ = _without("g1_1")
    assert outputs[1] is None
    assert outputs[0] is not None


def test_a_sum_with_a_missing_gradient_is_the_other_one() -> None:
    _, outputs, _ = _without("g1_1")
    assert str(outputs[0]) == "mm"
    _, outputs, _ = _without("g0_1")
    assert str(outputs[0]) == "mm_1"


def test_an_input_stays_only_where_zeros_are_needed() -> None:
    names, _, result = _without("g1_1")
    assert names == ["w_1", "g0_1", "g1_1"]  # of the concatenation
    w, g = torch.randn(3, 3), torch.randn(3, 3)
    zeros = torch.zeros(3, 3)
    first, _, third = result(w, g, zeros)
    assert torch.equal(first, g @ w)
    assert torch.equal(third, torch.cat([g, zeros]))
