"""Bugs that random graphs or hard thinking found: each test tells one story."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.nn import functional

import partita
from partita._torch.autograd.region_switches import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    SET_GRAD,
)
from partita.errors import OrderConflict

X = torch.linspace(-1.0, 2.0, 16).reshape(4, 4)


def made(graph: Graph, root: nn.Module | None = None) -> GraphModule:
    return GraphModule(root if root is not None else nn.Module(), graph)


def assignable(gm: GraphModule) -> list[str]:
    switches = (SET_GRAD, ENTER_AUTOCAST, EXIT_AUTOCAST, ENTER_INFERENCE, EXIT_INFERENCE)
    return [
        node.name
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output") and node.target not in switches
    ]


def weighted() -> nn.Module:
    root = nn.Module()
    root.w = nn.Parameter(X.clone().cos())
    return root


def two_autocast_regions(changed_between: bool) -> GraphModule:
    """Four products with one weight, two in each region."""
    g = Graph()
    x, w = g.placeholder("x"), g.get_attr("w")
    products = []
    for number in range(2):
        entered = g.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, True))
        products += [g.call_function(torch.matmul, (x, w)) for _ in range(2)]
        g.call_function(EXIT_AUTOCAST, (entered,))
        if changed_between and number == 0:
            g.call_function(SET_GRAD, (False,))
            g.call_method("mul_", (w, 3.0))
            g.call_function(SET_GRAD, (True,))
    g.output(tuple(products))
    return made(g, weighted())


@pytest.mark.parametrize("changed_between", [False, True])
def test_two_autocast_regions_do_not_share_converted_weights(changed_between: bool) -> None:
    """A cache that was held open for one region served the next one too: its weight was stale, and
    gradients were summed in low precision across both.
    """
    gm = two_autocast_regions(changed_between)
    names = assignable(gm)
    for keys in itertools.product(range(2), repeat=len(names)):
        cut = partita.split(gm, dict(zip(names, keys, strict=True)), on_conflict="repair")
        partita.verify(cut, gm, (X,)).check()


def test_autocast_regions_that_need_their_cache_again_are_not_interleaved() -> None:
    gm = two_autocast_regions(changed_between=False)
    keys = dict(zip(assignable(gm), (0, 1, 0, 1), strict=True))
    with pytest.raises(
        OrderConflict, match="two autocast regions that share weights, and its cache would be lost"
    ):
        partita.split(gm, keys)


def test_autocast_regions_that_need_no_cache_again_may_be_interleaved() -> None:
    g = Graph()
    x, w = g.placeholder("x"), g.get_attr("w")
    y = [x, g.call_function(torch.exp, (x,))]
    for _ in range(2):
        entered = g.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, True))
        y = [g.call_function(torch.matmul, (y[0], w)), g.call_function(torch.sin, (y[1],))]
        g.call_function(EXIT_AUTOCAST, (entered,))
    g.output(tuple(y))
    gm = made(g, weighted())
    cut = partita.split(gm, dict(zip(assignable(gm), (1, 0, 1, 0, 1), strict=True)))
    partita.verify(cut, gm, (X,)).check()


def test_a_weight_used_with_and_without_grad_under_autocast() -> None:
    """Whoever is first, the conversion that the other use is given has its gradient."""
    g = Graph()
    x, w = g.placeholder("x"), g.get_attr("w")
    a = g.call_function(torch.sin, (x,))
    entered = g.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, True))
    g.call_function(SET_GRAD, (False,))
    b = g.call_function(torch.matmul, (a, w))
    g.call_function(SET_GRAD, (True,))
    c = g.call_function(torch.matmul, (x, w))
    g.call_function(EXIT_AUTOCAST, (entered,))
    g.output((a, b, c, g.call_function(torch.neg, (c,))))
    gm = made(g, weighted())
    for keys in itertools.product(range(3), repeat=4):
        cut = partita.split(gm, dict(zip(assignable(gm), keys, strict=True)), on_conflict="repair")
        partita.verify(cut, gm, (X,)).check()


def test_grad_mode_that_is_set_within_inference_mode_ends_with_it() -> None:
    """Leaving inference mode brings back the grad mode from before it; the pieces went on with the one set
    inside.
    """
    g = Graph()
    x = g.placeholder("x")
    g.call_function(SET_GRAD, (True,))
    a = g.call_function(torch.sin, (x,))
    entered = g.call_function(ENTER_INFERENCE, (True,))
    g.call_function(SET_GRAD, (True,))
    b = g.call_function(torch.is_grad_enabled)
    g.call_function(SET_GRAD, (False,))
    c = g.call_function(torch.is_grad_enabled)
    g.call_function(EXIT_INFERENCE, (entered,))
    d = g.call_function(torch.cos, (a,))
    g.output((a, b, c, d, g.call_function(torch.is_grad_enabled)))
    gm = made(g)
    names = assignable(gm)
    for keys in itertools.product(range(2), repeat=len(names)):
        cut = partita.split(gm, dict(zip(names, keys, strict=True)), on_conflict="repair")
        partita.verify(cut, gm, (X.clone().requires_grad_(),)).check()


def test_inference_mode_false_switches_grad_on_inside_no_grad() -> None:
    g = Graph()
    x = g.placeholder("x")
    g.call_function(SET_GRAD, (False,))
    entered = g.call_function(ENTER_INFERENCE, (False,))
    a = g.call_function(torch.sin, (x,))
    g.call_function(EXIT_INFERENCE, (entered,))
    b = g.call_function(torch.cos, (x,))
    g.call_function(SET_GRAD, (True,))
    g.output((a, b))
    gm = made(g)
    for keys in itertools.product(range(2), repeat=2):
        cut = partita.split(gm, dict(zip(("sin", "cos"), keys, strict=True)))
        partita.verify(cut, gm, (X.clone().requires_grad_(),)).check()


def reordering(build: Any) -> tuple[GraphModule, partita.Split]:
    """A graph of three steps after ``base``: a change, a reader of it, and a node that lures the reader's
    piece to the front.
    """
    g = Graph()
    x = g.placeholder("x")
    lure = g.call_function(torch.exp, (x,))
    base = g.call_function(torch.cos, (x,))
    changed, reader = build(g, base)
    g.output((lure, reader))
    gm = made(g)
    cut = partita.split(
        gm, {name: 0 if name in ("exp", reader.name) else 1 for name in assignable(gm)}, on_conflict="repair"
    )
    del changed
    return gm, cut


def _by_tuple_out(g: Graph, base: Any) -> Any:
    index = g.call_function(torch.zeros, (4, 4), {"dtype": torch.long})
    return g.call_function(torch.sort, (base,), {"out": (base, index)}), g.call_function(torch.sin, (base,))


def _by_python_out(g: Graph, base: Any) -> Any:
    return g.call_function(functional.normalize, (base,), {"out": base}), g.call_function(torch.sin, (base,))


def _by_plus(g: Graph, base: Any) -> Any:
    same = g.call_function(operator.pos, (base,))
    return g.call_method("mul_", (same, 2)), g.call_function(torch.sin, (base,))


def _by_container(g: Graph, base: Any) -> Any:
    box = g.call_function(dict, ([("a", 1)],))
    g.call_function(operator.setitem, (box, "t", base))
    item = g.call_function(operator.getitem, (box, "t"))
    return g.call_method("mul_", (base, 2)), g.call_function(torch.sin, (item,))


def _by_foreach(g: Graph, base: Any) -> Any:
    both = g.call_function(torch._foreach_mul_, ([base], 2.0))
    same = g.call_function(operator.getitem, (both, 0))
    return g.call_method("mul_", (base, 2)), g.call_function(torch.sin, (same,))


@pytest.mark.parametrize("build", [_by_tuple_out, _by_python_out, _by_plus, _by_container, _by_foreach])
def test_every_way_to_change_a_value_comes_before_its_next_reader(build: Any) -> None:
    """Each of these was once taken to change nothing, or to make a value of its own."""
    gm, cut = reordering(build)
    partita.verify(cut, gm, (X,)).check()


class Keeper(nn.Module):
    """Unknown code that changes, at its second call, what it was given at its first."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept:
            self.kept.pop().mul_(2)
        else:
            self.kept.append(x)
        return x + 1


def test_unknown_code_may_change_later_what_it_was_given_before() -> None:
    g = Graph()
    x = g.placeholder("x")
    a, b = g.call_function(torch.exp, (x,)), g.call_function(torch.cos, (x,))
    g.call_module("keeper", (a,))
    g.call_module("keeper", (b,))
    g.output(g.call_function(torch.sin, (a,)))
    root = nn.Module()
    root.keeper = Keeper()
    gm = made(g, root)
    with pytest.raises(OrderConflict, match=r"unknown module 'keeper' \(Keeper\)"):
        partita.split(gm, {"exp": 0, "cos": 1, "keeper": 1, "keeper_1": 1, "sin": 0})
    cut = partita.split(gm, {"exp": 0, "cos": 1, "keeper": 1, "keeper_1": 1, "sin": 0}, on_conflict="repair")
    assert torch.equal(cut.module(X), X.exp().mul(2).sin())


def test_sorting_writes_nothing() -> None:
    """TorchScript's in-place ``sort`` of a list of numbers shares its name with the operator on tensors."""
    g = Graph()
    x = g.placeholder("x")
    a = g.call_function(torch.neg, (x,))
    s = g.call_function(torch.sort, (x,))
    g.output((a, s, g.call_function(torch.abs, (x,))))
    cut = partita.split(made(g), {"neg": 0, "sort": 1, "abs_1": 0})
    assert not cut.report.conflicts
