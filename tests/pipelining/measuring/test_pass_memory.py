from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partita.pipelining.measuring import pass_memory as pass_memory_module
from partita.pipelining.measuring.pass_memory import OutputMemory, pass_memory
from partita.pipelining.measuring.unit_run import UnitRun

DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


def unit(call: Callable[..., Any], *inputs: Any, module: nn.Module | None = None, **options: Any) -> UnitRun:
    def as_sequence(*args: Any) -> Sequence[Any]:
        result = call(*args)
        return result if isinstance(result, tuple) else (result,)

    return UnitRun("unit", as_sequence, inputs, tuple(module.parameters()) if module else (), **options)


def x(device: str, *sizes: int) -> Tensor:
    return torch.randn(*sizes, device=device, requires_grad=True)


@DEVICES
def test_a_linear_layer_keeps_its_input_and_w_needs_the_gradient_that_i_caught(device: str) -> None:
    layer = nn.Linear(64, 32, device=device)
    memory = pass_memory(unit(layer, x(device, 16, 64), module=layer))
    assert memory.own_bytes == 0
    assert memory.keeps_input == (True,)
    assert memory.outputs == (OutputMemory(0, 16 * 32 * 4, None, False, wants_gradient=True),)
    assert memory.left_bytes == memory.caught_bytes == 16 * 32 * 4
    assert memory.leaves_input == (True,)
    assert memory.forward_workspace_bytes == 0  # there is nothing else than the output
    assert memory.backward_workspace_bytes >= 16 * 32 * 4 + 16 * 64 * 4


@DEVICES
def test_a_view_taken_without_gradients_has_none(device: str) -> None:
    """The measurement, and with it the cut, ended in an AssertionError of torch."""

    def view(value: Tensor) -> Tensor:
        with torch.no_grad():
            return value[:, 1:]

    assert pass_memory(unit(view, x(device, 4, 8))).outputs == (OutputMemory(0, 128, 0, False, shown=112),)


@DEVICES
def test_an_activation_keeps_its_output_and_i_frees_it(device: str) -> None:
    memory = pass_memory(unit(torch.relu, x(device, 8, 8)))
    assert (memory.own_bytes, memory.keeps_input) == (0, (False,))
    assert memory.outputs == (OutputMemory(0, 256, None, True, wants_gradient=True),)
    assert (memory.left_bytes, memory.caught_bytes, memory.leaves_input) == (0, 0, (False,))


@DEVICES
def test_w_needs_of_its_inputs_those_that_its_weights_are_multiplied_with(device: str) -> None:
    layer = nn.Linear(8, 8, device=device)

    def gated(one: Tensor, other: Tensor) -> Tensor:
        return layer(one) * other

    memory = pass_memory(unit(gated, x(device, 4, 8), x(device, 4, 8), module=layer))
    assert memory.keeps_input == (True, True)
    assert memory.leaves_input == (True, False)


@DEVICES
def test_what_lies_between_is_the_units_own(device: str) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device)
    memory = pass_memory(unit(layers, x(device, 4, 8), module=layers))
    assert memory.own_bytes == 4 * 8 * 4
    assert memory.left_bytes == 3 * 4 * 8 * 4  # the result of tanh, and two gradients
    assert memory.caught_bytes == 4 * 8 * 4  # one of these was sent to it


@DEVICES
def test_outputs_that_share_memory_or_are_the_input_say_so(device: str) -> None:
    def call(value: Tensor) -> tuple[Any, ...]:
        low, high = (2 * value).chunk(2)
        return low, high, value.t(), 3

    memory = pass_memory(unit(call, x(device, 4, 8)))
    assert memory.outputs == (
        OutputMemory(0, 128, None, False, wants_gradient=True, shown=64),
        OutputMemory(0, 128, None, False, wants_gradient=True, shown=64),
        OutputMemory(2, 128, 0, False, wants_gradient=True),
        None,
    )


def test_what_a_custom_function_hides_in_an_attribute_counts_too() -> None:
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            ctx.own = value.exp()
            return value + 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * ctx.own  # type: ignore[no-any-return]

    assert pass_memory(unit(Hidden.apply, x("cpu", 10))).own_bytes == 40


@DEVICES
def test_without_a_gradient_nothing_is_kept(device: str) -> None:
    layer = nn.Linear(8, 8, device=device).requires_grad_(False)
    memory = pass_memory(unit(layer, x(device, 4, 8).detach(), module=layer))
    assert (memory.own_bytes, memory.keeps_input, memory.left_bytes) == (0, (False,), 0)
    assert (memory.forward_workspace_bytes, memory.backward_workspace_bytes) == (0, 0)


@DEVICES
def test_a_workspace_is_what_is_there_only_while_a_pass_runs(device: str) -> None:
    memory = pass_memory(unit(lambda value: value.repeat(50).sum(), x(device, 8), is_last=True))
    assert memory.forward_workspace_bytes >= 50 * 8 * 4
    assert memory.own_bytes == 0


@DEVICES
def test_gradients_that_are_shared_are_copied_in_the_first_unit_of_a_stage_only(device: str) -> None:
    """Residual sums, run alone, copied theirs, and were planned three times what they need within a stage."""
    one, other = x(device, 8), x(device, 8)
    memory = pass_memory(unit(lambda one, other: one + other, one, other))
    assert memory.backward_workspace_bytes == memory.input_workspace_bytes == one.nbytes
    assert memory.copied_gradient_bytes == 2 * one.nbytes
    memory = pass_memory(unit(lambda one, other: one * other, one, other))
    assert (memory.backward_workspace_bytes, memory.copied_gradient_bytes) == (3 * one.nbytes, 0)


UNITS: dict[str, Callable[..., Any]] = {
    "product": lambda one, other: one * other,
    "sum": lambda one, other: one + other,
    "residual": lambda one, other: one + (one * other).tanh(),
    "one passed on": lambda one, other: (one, one * other),
    "both passed on": lambda one, other: (one, other),
    "view": lambda one, other: (one.view(-1), other.t().exp()),
    "one unused": lambda one, other: one.exp(),
    "transposed": lambda one, other: one.t() @ other,
    "joined": lambda one, other: torch.cat([one, other]),
    "expanded": lambda one, other: (one.sum(), other.mean(0)),
}


@pytest.mark.parametrize("name", UNITS)
@DEVICES
def test_b_runs_once_where_it_needs_the_same_as_a_first_unit_and_within(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_unit = unit(UNITS[name], x(device, 4, 4), x(device, 4, 4))
    memory = pass_memory(a_unit)
    backward = pass_memory_module._whole_workspace
    monkeypatch.setattr(
        pass_memory_module,
        "_whole_workspace",
        lambda *args, **options: (backward(*args, **options)[0], False),
    )
    assert pass_memory(a_unit) == memory
    assert backward(a_unit, is_first=True)[1] == (
        name not in ("sum", "one passed on", "both passed on", "expanded")
    )


@DEVICES
def test_gradients_of_what_is_joined_lie_in_one_memory(device: str) -> None:
    def joined(one: Tensor, other: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return torch.cat((one, other), -1), other * scale

    memory = pass_memory(
        unit(lambda one, other: torch.cat((one, other), -1), x(device, 8, 2), x(device, 8, 6))
    )
    assert memory.gradients == ((0, 8 * 8 * 4), (0, 8 * 8 * 4))
    memory = pass_memory(unit(joined, x(device, 8, 2), x(device, 8, 6), 2.0))  # the other's are summed
    assert memory.gradients == ((0, 8 * 8 * 4), (1, 8 * 6 * 4), None)


def test_an_input_that_is_written_to_is_left_as_it_was_and_gradients_are_not_left_behind() -> None:
    layer, value = nn.Linear(4, 4), x("cpu", 2, 4)
    before = value.detach().clone()
    pass_memory(unit(lambda it: layer(it.relu_()), value, module=layer, copied=frozenset({0})))
    assert torch.equal(value, before)
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_an_output_without_a_gradient_behind_it_is_not_sent_back() -> None:
    def call(value: Tensor) -> tuple[Tensor, Tensor]:
        return value.exp(), functional.softmax(value, -1)

    both, one = (pass_memory(unit(call, x("cpu", 4, 4), seeded=seeded)) for seeded in (None, (True, False)))
    assert both.backward_workspace_bytes > one.backward_workspace_bytes


def test_inputs_may_be_numbers_lists_and_sparse() -> None:
    sparse = torch.eye(4).to_sparse()
    memory = pass_memory(
        unit(lambda m, items, k: torch.sparse.mm(m, items[0]) * k, sparse, [x("cpu", 4, 4)], 2)
    )
    assert memory.keeps_input[1:] == (False, False)
