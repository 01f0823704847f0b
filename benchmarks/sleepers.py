"""Stages that sleep instead of computing: so more ranks than cores measure a runtime, not the machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WIDTH", "Sleeper", "sleepers"]

WIDTH = 8
"""Numbers that a sample has, between any two stages."""


@torch.library.custom_op("partita_bench::nap", mutates_args=())
def _nap(x: Tensor, forward_s: float, backward_s: float) -> Tensor:  # noqa: ARG001
    """A copy, after so many seconds; its gradient takes as long as it says."""
    time.sleep(forward_s)
    return x.clone()


@_nap.register_fake
def _(x: Tensor, forward_s: float, backward_s: float) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:  # noqa: ARG001
    ctx.backward_s = inputs[2]


def _nap_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _nap(gradient, ctx.backward_s, 0.0), None, None


_nap.register_autograd(_nap_backward, setup_context=_keep)


class Sleeper(nn.Module):
    """Sleeps on the way of the values, and on the way of the weight's gradient: so I and W are told apart.

    Args:
        unit_s: seconds of F, of I and of W.
    """

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.unit_s = unit_s
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _nap(x, self.unit_s, self.unit_s) + _nap(self.weight, 0.0, self.unit_s)


def sleepers(units_s: Sequence[float]) -> nn.Sequential:
    """One after the other."""
    return nn.Sequential(*map(Sleeper, units_s))
