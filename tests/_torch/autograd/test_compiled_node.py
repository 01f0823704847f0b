"""Asking the autograd node of a compiled graph for one half of its backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita._torch.autograd.compiled_node import (
    ask,
    asked,
    hide_missing,
    in_halves,
    leave,
    mark,
    second_half,
    site_of_node,
)


class CompiledFunction(torch.autograd.Function):
    """Called as AOTAutograd calls its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x.clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor | None) -> tuple[Tensor | None, ...]:
        seen.append((asked(), second is None, site_of_node()))
        x, w = ctx.saved_tensors
        if asked() is None:
            return first * w, first * x
        leave(lambda: iter([(1, first * x)]))
        return first * w, None


seen: list[tuple[frozenset[int] | None, bool, int]] = []


def test_a_node_is_asked_for_one_half_and_runs_the_other_later() -> None:
    seen.clear()
    x, w = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    outputs = CompiledFunction.apply(x, w)
    node = outputs[0].grad_fn
    assert not in_halves(node)
    mark(outputs, 7)
    assert in_halves(node)
    ask(node, frozenset({0}))
    (gradient,) = torch.autograd.grad(outputs[0], [x], retain_graph=True)
    assert gradient == 3.0
    ((edge, late),) = second_half(node)
    assert edge.node.variable is w
    assert late == 2.0
    assert list(second_half(node)) == []
    outputs[0].backward()
    assert w.grad == 2.0
    assert seen == [(frozenset({0}), True, 7), (None, True, 7)]  # and without a gradient of the second output


class OneGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x + w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        hide_missing([1])
        return gradient, None


def test_hooks_of_a_leaf_are_not_called_where_a_node_has_no_gradient_for_it() -> None:
    x, w = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    w.register_hook(lambda gradient: gradient * 2)
    hooks = dict(w._backward_hooks)
    OneGradient.apply(x, w).backward()
    assert w.grad is None
    assert w._backward_hooks == hooks
    (OneGradient.apply(x, w) + w).backward()  # another node has one
    assert w.grad == 2.0
