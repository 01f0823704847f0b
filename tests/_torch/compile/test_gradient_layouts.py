"""Gradients that arrive in another layout than AOTAutograd has guessed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from partita._torch.compile.aot import AotGraph, compile_ahead


@torch.library.custom_op("partita_test_layouts::in_plain_order", mutates_args=())
def in_plain_order(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous()
    return x * 2


in_plain_order.register_fake(torch.empty_like)
in_plain_order.register_autograd(lambda _, gradient: in_plain_order(gradient.contiguous()))


@torch.library.custom_op("partita_test_layouts::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    seen.append(x.stride())
    return x.contiguous() * 2


seen: list[tuple[int, ...]] = []
doubled.register_fake(lambda x: torch.empty(x.shape))
doubled.register_autograd(lambda _, gradient: doubled(gradient))


@pytest.mark.parametrize(
    ("function", "by_operator", "strides"),
    [
        (torch.cos, True, [(1, 4)]),
        (torch.cos, False, [(3, 1)]),  # a compiler may count on it
        (in_plain_order, True, [(1, 4)]),
        (lambda x: x.cos().as_strided((4, 3), (3, 1)), True, [(1, 4)]),
        (lambda x: doubled(x.cos().expand(2, 4, 3).clone()).sum(0), True, [(3, 1)]),  # with gaps
    ],
    ids=["operators", "a compiler", "a user's operator", "strides", "expanded"],
)
def test_a_gradient_is_taken_as_it_lies_and_laid_out_for_who_needs_it(
    function: Any, by_operator: bool, strides: list[tuple[int, ...]]
) -> None:
    """AOTAutograd copied it into the layout of the output, which has other last bits."""
    arrived = list[tuple[int, ...]]()

    def keep(graph: AotGraph) -> Any:
        def run(*values: torch.Tensor) -> Any:
            if graph.kind == "backward":
                arrived.append(values[-1].stride())
            return graph.gm(*values)

        return run

    compiled = torch.compile(
        function, backend=lambda gm, inputs: compile_ahead(gm, inputs, keep, by_operator=by_operator)
    )
    x, gradient = torch.randn(4, 3, requires_grad=True), torch.randn(3, 4).t()
    compiled(x).backward(gradient)
    assert arrived == strides
    (expected,) = torch.autograd.grad(function(x), x, gradient)
    assert torch.equal(x.grad, expected)


def test_an_operand_that_was_traced_transposed_is_laid_out_so() -> None:
    compiled = torch.compile(
        lambda x: doubled(x.cos()).mT.contiguous(),
        backend=lambda gm, inputs: compile_ahead(gm, inputs, lambda it: it.gm, by_operator=True),
    )
    x = torch.randn(4, 3, requires_grad=True)
    seen.clear()
    result = compiled(x)
    result.backward(torch.ones(4, 3).t())
    assert seen == [(3, 1), (1, 4)]
    assert torch.equal(x.grad, -2 * x.detach().sin())


def test_a_users_operator_does_not_change_the_bits_of_others() -> None:
    """All gradients were copied into the traced layouts, and norms added up in another order."""

    def function(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * scale).transpose(1, 2), in_plain_order(x)

    compiled = torch.compile(
        function, backend=lambda gm, inputs: compile_ahead(gm, inputs, lambda it: it.gm, by_operator=True)
    )
    torch.manual_seed(0)
    x, scale = torch.randn(2, 10, 4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    gradients = torch.randn(2, 4, 10, 8), torch.randn(2, 10, 4, 8)
    expected = torch.autograd.grad(function(x, scale), (x, scale), gradients)
    got = torch.autograd.grad(compiled(x, scale), (x, scale), gradients)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: functional.group_norm(x, 2), (2, 4, 3, 3)),
        (lambda x: functional.group_norm(x.to(memory_format=torch.channels_last), 2), (2, 4, 3, 3)),
        (lambda x: torch._weight_norm(x, torch.ones(8, 1), 0), (8, 6)),
        (lambda x: torch.view_as_real(torch.fft.fft(x)), (4, 4)),
        (lambda x: torch.cdist(x, torch.ones(7, 3)), (5, 3)),
        (lambda x: functional.interpolate(x, scale_factor=2), (2, 4, 6, 6)),
    ],
    ids=["group norm", "channels last", "weight norm", "complex", "distances", "interpolation"],
)
def test_what_kernels_need_in_plain_order_is_laid_out_before(function: Any, shape: tuple[int, ...]) -> None:
    """Torch's formulas do so, which a trace does not show; the kernels read other numbers."""
    compiled = torch.compile(
        function, backend=lambda gm, inputs: compile_ahead(gm, inputs, lambda it: it.gm, by_operator=True)
    )
    x = torch.randn(shape, requires_grad=True)
    gradient = torch.randn_like(function(x).mT.contiguous()).mT
    (expected,) = torch.autograd.grad(function(x), x, gradient)
    compiled(x).backward(gradient)
    assert torch.equal(x.grad, expected)
