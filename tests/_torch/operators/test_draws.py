"""Which calls draw random numbers, and which would only if they were told to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from partita._torch.operators.draws import before_draws


@pytest.mark.parametrize(
    ("call", "draws"),
    [
        (lambda x: functional.scaled_dot_product_attention(x, x, x), False),
        (lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5), True),
        (lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0], False),
        (lambda x: torch.ops.aten.native_dropout(x, 0.5, False)[0], False),
        (lambda x: torch.ops.aten.native_dropout(x, 0.5, None)[0], True),
        (lambda x: functional.rrelu(-x, training=False), False),
        (lambda x: functional.rrelu(-x, training=True), True),
        (torch.bernoulli, True),
        (torch.relu, False),
    ],
)
def test_what_draws_is_told_and_nothing_else(call: Callable[[Tensor], Tensor], draws: bool) -> None:
    x, names = torch.full((1, 2, 4, 8), 0.5), list[str]()
    before = torch.get_rng_state()
    with before_draws(names.append):
        call(x)
    assert bool(names) is draws
    assert torch.equal(before, torch.get_rng_state()) is not draws


def test_what_the_functions_of_torch_cond_draw_is_told_too() -> None:
    """No mode of ours took such an operator: `verify_step` raised torch's error for each model with one."""
    layer, x, names = torch.nn.Linear(4, 4), torch.ones(2, 4), list[str]()

    def call() -> Tensor:
        drawn = torch.cond(x.sum() > 0, lambda x: functional.dropout(layer(x)), torch.sin, (x,))
        return drawn.sum()  # type: ignore[no-any-return]

    with before_draws(names.append):
        call().backward()
    assert "aten::bernoulli_.float" in names
    assert layer.weight.grad is not None
    call().backward()  # and goes on without


@pytest.mark.parametrize("call", [torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__])
def test_matrix_products_are_those_outside(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Where a mode is active torch takes another kernel for many matrices by one: `verify_step` refused steps
    of a model with such a product, since the uncut model's last bits were others.
    """
    many, one, names = torch.randn(64, 3, 3), torch.randn(1, 3, 3), list[str]()
    expected = call(many, one)
    with before_draws(names.append):
        assert torch.equal(call(many, one), expected)
        torch.rand(1)
    assert names == ["aten::rand"]


def test_compiled_functions_are_still_whole() -> None:
    many, one, names = torch.randn(64, 3, 3), torch.randn(1, 3, 3), list[str]()

    def call() -> Tensor:
        return functional.dropout(many @ one, 0.5)

    with before_draws(names.append):
        torch.compile(call, backend="eager", fullgraph=True)()
    assert names == ["aten::bernoulli_.float"]
