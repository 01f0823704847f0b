"""Graphs that run operator by operator draw what eager mode draws, and scale it alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from partita._torch.compile.aot import compile_ahead


def _results(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    torch.manual_seed(1)
    output = run(leaf)
    output.backward(torch.linspace(-1, 1, output.numel()).to(output.dtype).view(output.shape))
    assert leaf.grad is not None
    return output, leaf.grad, torch.get_rng_state()


IMAGES = torch.linspace(-2, 2, 48).view(2, 4, 3, 2)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: functional.dropout(x, 0.1), IMAGES.bfloat16()),
        (lambda x: functional.dropout(x, 0.15), IMAGES),
        (lambda x: functional.dropout(x, 1.0), IMAGES),
        (lambda x: torch.native_dropout(x, 0.15, True)[0], IMAGES),
        (lambda x: functional.alpha_dropout(x, 0.5, True), IMAGES.to(memory_format=torch.channels_last)),
        (lambda x: x * torch.empty_like(x).bernoulli_(0.3), IMAGES.mT),
        (lambda x: x * torch.bernoulli(x.detach(), 0.3), IMAGES.mT),
    ],
    ids=["low precision", "rate", "all", "by name", "alpha", "in place", "out of place"],
)
def test_what_a_trace_draws_otherwise_is_drawn_as_in_eager_mode(function: Any, x: Tensor) -> None:
    """``torch.compile(backend="aot_eager")`` has other last bits in the first two, and drops other elements
    in ``alpha`` and ``in place``.
    """
    compiled = torch.compile(
        function, backend=lambda gm, inputs: compile_ahead(gm, inputs, lambda it: it.gm, by_operator=True)
    )
    pairs = zip(_results(compiled, x), _results(function, x), strict=True)
    assert [torch.equal(*pair) for pair in pairs] == [True, True, True]
