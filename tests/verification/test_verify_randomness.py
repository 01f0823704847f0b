"""Random numbers: how many are drawn, in which order, from which generator."""

from __future__ import annotations

import random
from typing import Any

import torch
from tests.verification.nets import X, assert_only, kinds
from torch import nn

from partita.verification import verify


def test_one_random_number_more_is_reported() -> None:
    def once() -> torch.Tensor:
        return torch.rand(2)

    def more() -> torch.Tensor:
        drawn = torch.rand(2)
        torch.rand(1)
        return drawn

    assert verify(once, once, ()).ok
    assert_only(verify(more, once, ()), "random state", "CPU generator after forward")


def test_draws_in_another_order_are_reported() -> None:
    def first() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(2), torch.rand(2)

    assert kinds(verify(lambda: first()[::-1], first, ())) == {"output"}


def test_draws_from_other_generators_are_reported() -> None:
    assert_only(
        verify(lambda: random.random() and None, lambda: None, ()),
        "random state",
        "Python generator after forward",
    )

    class Own(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)
            self.step = count

        def forward(self) -> None:
            torch.rand(self.step, generator=self.generator)

    assert_only(verify(Own(1), Own(2), ()), "attribute", "attribute generator")
    assert verify(Own(1), Own(1), ()).ok
    free = torch.Generator().manual_seed(5)
    before = free.get_state()
    assert verify(lambda: torch.rand(1, generator=free), lambda: torch.rand(1, generator=free), ()).ok
    assert not verify(lambda: None, lambda: torch.rand(1, generator=free) and None, ()).ok
    assert_only(
        verify(lambda g: None, lambda g: torch.rand(1, generator=g) and None, (free,)), "input", "args[0]"
    )
    assert torch.equal(free.get_state(), before)


def test_a_draw_in_the_backward_is_reported() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            torch.rand(1)
            return gradient

    result = verify(Noisy.apply, torch.clone, (X.clone().requires_grad_(),))
    assert_only(result, "random state", "CPU generator after backward")


def test_the_seed_decides_what_is_drawn() -> None:
    def lucky(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand(()) < 0.5 else x * 3

    def unlucky(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand(()) < 0.5 else x * 4

    results = {verify(lucky, unlucky, (X,), seed=seed).ok for seed in range(12)}
    assert results == {True, False}
