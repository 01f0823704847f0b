"""Functions with a backward pass of their own: none of them is what autograd would have made of the forward
pass, so that who loses it gets other gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = ["FUNCTIONS"]


class Reversal(Function):
    """Gradients the other way round; takes a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.scale * gradient, None


class StraightThrough(Function):
    """Rounds, and lets gradients pass; its context is set up apart."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, rounded = ctx.saved_tensors
        return gradient * (1 + (x - rounded).abs())


class Halves(Function):
    """Two results, of which one has no gradient, and one that is a slice of what comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(y)
        signs = (x > 0).float()
        ctx.mark_non_differentiable(signs)
        return torch.cat([x, y], 1)[:, : x.shape[1]] * 1.5, signs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * 2, gradient * y.sign() if ctx.needs_input_grad[1] else None


class Scaled(Function):
    """Writes to what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.flip(1)


def _halves(x: Tensor) -> Tensor:
    left, signs = Halves.apply(x, x.tanh())
    return left + signs


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "reversal": lambda x: Reversal.apply(x, 0.5),
    "straight_through": lambda x: StraightThrough.apply(x.tanh() * 4),
    "halves": _halves,
    "halves, one detached": lambda x: Halves.apply(x, x.detach().cos())[0],
    "scaled": lambda x: Scaled.apply(x * 1),
}
