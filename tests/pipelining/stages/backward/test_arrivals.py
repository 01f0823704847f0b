from __future__ import annotations

import pytest
import torch
from torch import Tensor

from partita.pipelining.stages.backward.arrivals import Arrivals

SHAPE = (3, 4)
GRADIENTS = {
    "contiguous": torch.randn(SHAPE),
    "transposed": torch.randn(4, 3).t(),
    "a slice": torch.randn(3, 8)[:, 2:6],
    "expanded": torch.randn(()).expand(SHAPE),
    "misaligned": torch.randn(16)[4 - 1 : 15].view(SHAPE),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_is_taken_as_it_comes(name: str, transposed: bool) -> None:
    gradient = GRADIENTS[name]
    leaf = (torch.randn(4, 3).t() if transposed else torch.randn(SHAPE)).requires_grad_()
    arrivals = Arrivals([leaf])
    leaf.view_as(leaf).backward(gradient)
    (arrived,) = arrivals.gradients()
    assert arrived is not None
    assert arrived.stride() == gradient.stride()
    assert arrived.data_ptr() % 64 == gradient.data_ptr() % 64
    assert torch.equal(arrived, gradient)


def test_a_compact_gradient_is_not_copied() -> None:
    leaf = torch.randn(SHAPE, requires_grad=True)
    addresses: list[int] = []

    class Passed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            replacement = gradient + 1
            addresses.append(replacement.data_ptr())
            return replacement

    arrivals = Arrivals([leaf])
    Passed.apply(leaf).sum().backward()
    (arrived,) = arrivals.gradients()
    assert arrived is not None
    assert [arrived.data_ptr()] == addresses


def test_nothing_comes_to_a_leaf_that_is_not_used() -> None:
    used, unused = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    arrivals = Arrivals([unused, used])
    (used * 2).sum().backward()
    first, second = arrivals.gradients()
    assert first is None
    assert second is not None


def test_nothing_comes_to_a_leaf_that_a_function_has_no_gradient_for() -> None:
    """Autograd calls the leaf's hooks all the same, with None."""

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, y: Tensor) -> Tensor:
            return x + y

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    used, unused = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    arrivals = Arrivals([unused, used])
    First.apply(used, unused).sum().backward()
    first, second = arrivals.gradients()
    assert first is None
    assert second is not None


def test_hooks_that_the_leaf_has_run_first() -> None:
    leaf = torch.randn(4, 3).t().requires_grad_()
    leaf.register_hook(lambda gradient: gradient * 3)
    arrivals = Arrivals([leaf])
    leaf.sum().backward()
    (arrived,) = arrivals.gradients()
    assert arrived is not None
    assert torch.equal(arrived, torch.full(SHAPE, 3.0))
