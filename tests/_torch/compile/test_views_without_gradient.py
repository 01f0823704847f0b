"""What comes to a view that was taken under no_grad stays there, compiled as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from partita._torch.compile.views_without_gradient import results_without_gradient
from partita.ddp import DDPOptimizer
from partita.pipelining import Schedule1F1B, SplitPoint, pipeline
from partita.runtime import Comm, InProcessWorld


class Views(nn.Module):
    """Results that are views taken under no_grad: of a result, of an input, and views of such ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.first(x).tanh()
        with torch.no_grad():
            middle = h[:, 1:-1]
            top = h.view(-1)[:3]
        inner = middle[:, 1:]
        h = self.second(h).tanh()
        return h, middle * 2, top.exp(), inner, middle


def loss_of(results: Sequence[Tensor], target: Tensor) -> Tensor:
    return sum(((result - target) ** 2).mean() for result in results)  # type: ignore[return-value]


def assert_equal_gradients(gradients: Sequence[Tensor | None], eager: nn.Module, compiler: str) -> None:
    tolerances = {"rtol": 0.0, "atol": 0.0} if compiler == "aot_eager" else {"rtol": 1e-5, "atol": 1e-6}
    for ours, parameter in zip(gradients, eager.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, **tolerances)


def marked(function: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """What `results_without_gradient` says of each graph of Dynamo's."""
    said = []

    def backend(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        said.append(results_without_gradient(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args)
    return said


class ViewOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.view(2, 3)


def test_views_under_no_grad_are_told_from_others() -> None:
    x = torch.ones(2, 3, requires_grad=True)

    def whole(x: Tensor) -> tuple[Tensor, ...]:
        h = x.sin()
        with torch.no_grad():
            seen, computed, detached = h[0], h.exp(), h.detach()[0]
        function = ViewOf.apply(x * 1)
        again = checkpoint(lambda value: value.cos()[0], x, use_reentrant=False)
        return h, h[0], seen, computed, detached, seen[1:], seen + 1, function, again, h[1].view(-1)

    assert marked(whole, x) == [(2, 5)]
    assert marked(lambda value: value.sin()[0], x) == [()]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_graph_of_a_compiled_model(compiler: str) -> None:
    model, eager = Views(), Views()
    eager.load_state_dict(model.state_dict())
    x, target = torch.randn(3, 4), torch.tensor(0.5)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="partita_ddp", options={"inner": compiler})
    for one in (compiled, eager):
        loss_of(one(x), target).backward()
    assert_equal_gradients([one.grad for one in model.parameters()], eager, compiler)


def test_a_forward_cut() -> None:
    model, eager = Views(), Views()
    eager.load_state_dict(model.state_dict())
    x, target = torch.randn(3, 4), torch.tensor(0.5)
    torch._dynamo.reset()
    compiled = torch.compile(
        model, backend=DDPOptimizer(1, torch._dynamo.lookup_backend("aot_eager")).compile_fn
    )
    for one in (compiled, eager):
        loss_of(one(x), target).backward()
    assert_equal_gradients([one.grad for one in model.parameters()], eager, "aot_eager")


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_compiled_stage_that_hands_on_a_view_and_what_it_is_of(compiler: str) -> None:
    """What the later stage sends back for the view went on to the first one's parameters, ten times what they
    get in eager mode.
    """

    class Handed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x).tanh()
            with torch.no_grad():
                v = h[:, 1:-1]
            return self.b(h).tanh() + self.c(v), v * 2

    model, eager = Handed(), Handed()
    eager.load_state_dict(model.state_dict())
    x, target = torch.randn(4, 4), torch.full((4, 1), 0.5)
    pipe = pipeline(model, (x[:2],), split_spec={"b": SplitPoint.BEGINNING}, compile=compiler)

    def train(comm: Comm) -> dict[str, Tensor]:
        stage = pipe.build_stage(comm.rank, comm=comm)
        args, targets = ((x,), {}) if comm.rank == 0 else ((), {"target": target})
        Schedule1F1B(stage, 2, loss_of).step(*args, **targets)
        return {name: parameter.grad for name, parameter in stage.module.named_parameters()}

    for start in (0, 2):
        (loss_of(eager(x[start : start + 2]), target[start : start + 2]) / 2).backward()
    gradients = {name: one for rank in InProcessWorld(2).run(train) for name, one in rank.items()}
    assert_equal_gradients([gradients[name] for name, _ in eager.named_parameters()], eager, compiler)
