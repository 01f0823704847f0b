"""Where stages begin that run the model's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.errors import CaptureError, InfeasiblePlan
from partita.pipelining import SplitPoint, pipeline

WIDTH = 4


class _Reversible(torch.autograd.Function):
    """Keeps its results alone: backward works its inputs out again, by the modules it was handed."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, f: nn.Module, g: nn.Module, *_: Tensor) -> Any:
        a = a + f(b)
        b = b + g(a)
        ctx.f, ctx.g = f, g
        ctx.save_for_backward(a.detach(), b.detach())
        return a, b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (a, b), (of_a, of_b) = ctx.saved_tensors, grads
        f, g = ctx.f, ctx.g
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            more, *of_g = torch.autograd.grad(g(a), [a, *g.parameters()], of_b)
            of_a = of_a + more
            b = (b - g(a)).detach().requires_grad_()
            more, *of_f = torch.autograd.grad(f(b), [b, *f.parameters()], of_a)
        return of_a, of_b + more, None, None, *of_f, *of_g


class ReversibleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        parameters = [*self.f.parameters(), *self.g.parameters()]
        both: tuple[Tensor, Tensor] = _Reversible.apply(a, b, self.f, self.g, *parameters)
        return both


class ReversibleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ReversibleBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a = b = self.first(x)
        for block in self.blocks:
            a, b = block(a, b)
        return a + b


def test_no_cut_lies_within_a_function() -> None:
    """Stages were planned to begin within one, whose backward pass then lacked the modules before."""
    model, x = ReversibleNet(), torch.randn(3, WIDTH)
    pipe = pipeline(model, (x,), stages=4, frontend="modules")
    partita.verify(pipe, model, (x,)).check()
    message = r"the cut at 'blocks\.1\.g' lies within the forward pass of a torch\.autograd\.Function"
    with pytest.raises(CaptureError, match=message):
        pipeline(model, (x,), split_spec={"blocks.1.g": SplitPoint.BEGINNING}, frontend="modules")
    with pytest.raises(InfeasiblePlan, match=r"at most 4: no cut lies within a torch\.autograd\.Function"):
        pipeline(model, (x,), stages=5, frontend="modules")


class Force(nn.Module):
    """The gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: self.energy(row).tanh().sum()))(x)  # type: ignore[no-any-return]


def test_a_module_that_takes_gradients_by_torch_func_is_measured() -> None:
    """torch's error about hooks of saved tensors came out of the measurement of its costs."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Force(), nn.Linear(WIDTH, WIDTH)), torch.randn(3, WIDTH)
    pipe = pipeline(model, (x,), stages=3, frontend="modules")
    partita.verify(pipe, model, (x,)).check()
