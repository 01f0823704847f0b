"""What is written after it was saved for a backward pass is an error in pieces as in the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from partita.ddp import DDPOptimizer


class Layers(nn.Module):
    def __init__(self, body: Callable[[Layers, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("scale", torch.ones(4))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def written_by_its_detached_view(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    view = y.view(-1).detach()
    z = m.b(y)
    view.add_(1)
    return m.c(z) + y


def written_far_behind(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    view = y.view(-1).detach()
    z = m.c(m.b(y))
    view.add_(1)
    return m.d(z) + view.sum()


def written_below_its_part(m: Layers, x: torch.Tensor) -> torch.Tensor:
    x = x * m.scale
    left, _ = x.chunk(2)
    z = m.c(m.b(left * m.a(left)))
    x.add_(1)
    return m.d(z)


def written_by_its_own_name(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    z = m.c(m.b(y))
    y.add_(1)
    return m.d(z) + y


def written_where_autograd_does_not_look(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    z = m.c(m.b(y))
    y.data.add_(1)
    return m.d(z) + y


def written_after_it_was_only_added(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x).relu()
    z = m.c(m.b(x) + y)
    z += y
    return m.d(z)


def forgetting(gm: Any, _inputs: Sequence[Any]) -> Any:
    """Inductor's kernels return memory with a version of its own; so does this, in no time."""

    def run(*args: Any) -> Any:
        results = gm(*args)
        anew = {id(value): value.data for value in results if isinstance(value, torch.Tensor)}
        return [anew.get(id(value), value) for value in results]

    return make_boxed_func(run)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    result = run(x)
    model.zero_grad()
    result.sum().backward()
    return [result.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    "body",
    [
        written_by_its_detached_view,
        written_far_behind,
        written_below_its_part,
        written_by_its_own_name,
    ],
)
def test_autograd_raises_as_it_does_for_the_whole(body: Any) -> None:
    """Inductor under `DDPOptimizer` trained with a gradient that was off by 4.77."""
    model = Layers(body)
    backend = aot_autograd(fw_compiler=forgetting)
    ways: list[Any] = [model, DDPOptimizer(1, backend, 1).compile_fn]
    for way in ways:
        run = model if way is model else torch.compile(model, backend=way)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trained(model, run)


@pytest.mark.parametrize(
    ("body", "pieces"), [(written_where_autograd_does_not_look, 2), (written_after_it_was_only_added, 4)]
)
def test_what_autograd_allows_is_equal_in_pieces(body: Any, pieces: int) -> None:
    model = Layers(body)
    expected = [value if value is None else value.clone() for value in trained(model, model)]
    seen: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append(gm)
        return aot_autograd(fw_compiler=forgetting)(gm, inputs)

    result = trained(model, torch.compile(model, backend=DDPOptimizer(1, backend, 1).compile_fn))
    assert all(torch.equal(a, b) for a, b in zip(expected, result, strict=True) if a is not None)
    assert len(seen) == pieces
