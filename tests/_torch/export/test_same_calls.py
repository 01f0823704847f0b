from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from partita._torch.export import same_calls
from partita._torch.export.same_calls import CallLog
from partita.errors import LongCapture


def _log(function: Any) -> CallLog:
    log = CallLog()
    log.begin()
    log.end(function())
    return log


def test_a_second_run_gets_the_results_of_the_first() -> None:
    x = torch.randn(3)
    log = _log(lambda: torch.rand(3) + x)
    results: list[Tensor] = []
    assert log.repeats(lambda: results.append(torch.rand(3)) or results[0] + x)
    before = torch.get_rng_state()
    assert log.repeats(lambda: torch.rand(3) + x)
    assert torch.equal(torch.get_rng_state(), before)  # nothing was computed


def test_somebody_who_waits_for_a_long_loop_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jamba at 4096 tokens was captured for more than ten minutes without a word."""
    monkeypatch.setattr(same_calls, "MANY_CALLS", 10)
    x = torch.randn(3)

    def scan(steps: int) -> Tensor:
        total = x
        for _ in range(steps):
            total = total + x
        return total

    with pytest.warns(
        LongCapture, match=r"recorded 10 calls .*now at total = total \+ x  # .* in scan: a loop"
    ) as told:
        _log(lambda: scan(30))
    assert len(told) == 1
    _log(lambda: scan(9))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x * 2,
        lambda x: x + 2,
        lambda x: x + 1.0,
        lambda x: x + True,
        lambda x: (x + 1) * 1,
        lambda x: x,
        lambda x: [x + 1],
        lambda x: x.clone() + 1,
        lambda x: torch.ops.aten.add.Scalar(x, 1),
        lambda x: {"x": x + 1}["y"],
    ],
)
def test_another_call_or_another_result_is_not_the_same(other: Any) -> None:
    x = torch.randn(3)
    log = _log(lambda: x + 1)
    assert log.repeats(lambda: x + 1)
    assert not log.repeats(lambda: other(x))


def test_one_that_goes_on_after_the_first_difference_is_not_the_same() -> None:
    x = torch.randn(3)

    def stubborn() -> Tensor:
        try:
            x.cos()
        except BaseException:
            return x
        raise AssertionError("x.cos() was not called at first")

    assert not _log(lambda: x).repeats(stubborn)


def test_what_was_in_a_list_when_it_was_given_counts() -> None:
    x = torch.randn(4)

    def first() -> list[Tensor]:
        shape = [2, 2]
        rows = [x.view(shape), x + 1]
        shape[0] = 4
        return rows

    log = _log(first)
    assert log.repeats(lambda: [x.view([2, 2]), x + 1])
    assert not log.repeats(lambda: [x.view([4, 2]), x + 1])


def test_arguments_that_cannot_be_compared_and_calls_that_raise_leave_it_open() -> None:
    x = torch.randn(3)
    array = x.numpy()
    assert not _log(lambda: torch.from_numpy(array)).repeats(lambda: torch.from_numpy(array))

    def caught() -> Tensor:
        try:
            return x.view(7)
        except RuntimeError:
            return x.cos()

    assert not _log(caught).repeats(caught)


def test_regions_count_for_the_calls_in_them_alone() -> None:
    x = torch.randn(3)

    def in_region(enabled: bool) -> Tensor:
        with torch.set_grad_enabled(enabled):
            return x.cos()

    def empty() -> Tensor:
        with torch.no_grad():
            pass
        return x.cos()

    log = _log(lambda: in_region(True))
    assert log.repeats(empty)
    assert not log.repeats(lambda: in_region(False))
    assert torch.is_grad_enabled()
