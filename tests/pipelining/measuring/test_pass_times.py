from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from partita._torch.operators.roofline import FixedSpeeds
from partita.pipelining.measuring.meter import CLOCK, Meter, roofline
from partita.pipelining.measuring.pass_times import UnitTimes, pass_times
from partita.pipelining.measuring.unit_run import UnitRun


def unit(module: nn.Module, *inputs: Any, **options: Any) -> UnitRun:
    return UnitRun("unit", lambda *args: (module(*args),), inputs, tuple(module.parameters()), **options)


def estimated(module: nn.Module, *inputs: Any) -> UnitTimes:
    return pass_times([unit(module, *inputs)], roofline(FixedSpeeds(1e9, 1e30)), repeats=1)[0]


def meta(*sizes: int, grad: bool = True) -> torch.Tensor:
    return torch.empty(*sizes, device="meta", requires_grad=grad)


def test_i_and_w_of_a_linear_layer_are_a_product_each() -> None:
    layer = nn.Linear(64, 32, bias=False, device="meta")
    times = estimated(layer, meta(128, 64))
    assert times.input_s == times.weight_s == pytest.approx(times.forward_s)
    assert times.backward_s == pytest.approx(2 * times.forward_s)
    assert times.spread == 0.0


def test_w_does_all_where_the_input_wants_no_gradient_and_i_where_there_are_no_weights() -> None:
    layer = nn.Linear(64, 32, bias=False, device="meta")
    first = estimated(layer, meta(128, 64, grad=False))
    assert (first.input_s, first.weight_s) == (0.0, first.backward_s)
    frozen = estimated(layer.requires_grad_(False), meta(128, 64))
    assert (frozen.input_s, frozen.weight_s) == (frozen.backward_s, 0.0)
    nothing = estimated(layer, meta(128, 64, grad=False))
    assert (nothing.backward_s, nothing.input_s, nothing.weight_s) == (0.0, 0.0, 0.0)


def test_the_median_counts_and_the_first_round_does_not() -> None:
    scripted = iter([100.0] * 5 + [1.0, 9.0, 2.0, 1.0, 1.0] * 2 + [50.0, 50.0, 2.0, 7.0, 1.0])

    def timed(call: Callable[[], Any]) -> tuple[Any, float]:
        return call(), next(scripted)

    # In each round: F, F, B, I, W.
    times = pass_times(
        [unit(nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True))], Meter(timed), repeats=3
    )
    assert times == [UnitTimes(5.0, 2.0, 1.0, 1.0, (52.0 - 7.0) / 7.0)]


def test_each_repeat_goes_through_all_units_and_progress_goes_to_one() -> None:
    calls: list[str] = []
    shares: list[float] = []
    units = [
        UnitRun(name, lambda x, name=name: (calls.append(name), x)[1:], (torch.ones(2),)) for name in "ab"
    ]
    pass_times(units, CLOCK, repeats=3, progress=shares.append)
    tried, measured = calls[:4], calls[4:]
    assert tried == ["a", "a", "b", "b"]  # does one write to what it has saved?
    assert measured == ["a", "b"] * 4
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_gradients_are_added_to_as_in_a_step_and_gone_afterwards() -> None:
    layer = nn.Linear(4, 4)
    seen: list[bool] = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad is not None))
    pass_times([unit(layer, torch.randn(2, 4, requires_grad=True))], CLOCK, repeats=1)
    assert len(seen) == 4
    assert all(parameter.grad is None for parameter in layer.parameters())


class Counts(nn.Module):
    """Writes in place to what its backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.weight * self.calls


def test_a_unit_that_writes_to_what_it_saved_goes_back_before_the_next_microbatch() -> None:
    """Two of its microbatches under way at once are an error of autograd's."""
    (times,) = pass_times([unit(Counts(), torch.randn(2, 4, requires_grad=True))], CLOCK, repeats=1)
    assert times.backward_s > 0.0
    assert times.weight_s > 0.0
