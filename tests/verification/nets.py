"""A model, an input, ways to be wrong, and assertions about the differences that `verify` reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from partita.verification import Verification

X = torch.linspace(-1.0, 2.0, 12).reshape(3, 4)


class Net(nn.Module):
    """Parameters, a buffer that changes, a random draw, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += 1
        hidden = self.drop(self.norm(self.inner(x)))
        return {"hidden": hidden, "total": hidden.sum()}


def make_net() -> Net:
    torch.manual_seed(1)
    return Net()


class WrongBackward(torch.autograd.Function):
    """A copy whose gradient is twice the right one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class WrongCopy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WrongBackward.apply(x)  # type: ignore[no-any-return]


class Copy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def raising(error: Exception) -> Callable[..., Any]:
    """A function that changes its argument and raises."""

    def run(x: torch.Tensor) -> Any:
        x += 1
        raise error

    return run


def kinds(result: Verification) -> set[str]:
    return {difference.kind for difference in result.differences}


def assert_only(result: Verification, kind: str, where: str) -> None:
    """There is one difference, and it is this one."""
    assert [(d.kind, d.where) for d in result.differences] == [(kind, where)], str(result)
