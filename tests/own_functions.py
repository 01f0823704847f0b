"""A model whose ``torch.autograd.Function``s have backward passes that are not the derivatives of what they
compute: whoever loses one gives other gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = ["Dirty", "OwnFunctions"]


class Dirty(Function):
    """Writes to its input, and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


class _Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -gradient


class _Rounded(Function):
    """Straight through; its context is made apart, and keeps a number."""

    @staticmethod
    def forward(x: torch.Tensor, steps: float) -> torch.Tensor:
        return (x * steps).round() / steps

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
        ctx.steps = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.steps, None


class _Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x.clamp(-0.1, 0.1)


class _SumAndProduct(Function):
    """Two results, a flag that is no tensor, and gradients that only some inputs need."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, twice: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, y)
        ctx.twice = twice
        return x + y, x * y

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_sum: torch.Tensor, of_product: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, y = ctx.saved_tensors
        factor = 2.0 if ctx.twice else 1.0
        mine = factor * of_sum + of_product * y if ctx.needs_input_grad[0] else None
        other = 3.0 * of_sum + of_product * x if ctx.needs_input_grad[1] else None
        return mine, other, None


class _Doubled(Function):
    """Writes to what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 3


class _Weighted(Function):
    """A layer, whose parameters get their gradients here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, 2 * gradient.t() @ x, 5 * gradient.sum(0)


class OwnFunctions(nn.Module):
    """Square layers, with a function of its own between each and the next."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth, last = self.layers
        x = _Reversed.apply(first(x))
        x = _Clipped.apply(_Rounded.apply(second(x).tanh(), 8.0))
        total, product = _SumAndProduct.apply(third(x), self.scale.expand_as(x), True)
        x = total + _SumAndProduct.apply(product, self.scale.detach().expand_as(x), False)[1]
        x = _Doubled.apply(_Weighted.apply(x, fourth.weight, fourth.bias) + 0)
        return last(x.tanh())
