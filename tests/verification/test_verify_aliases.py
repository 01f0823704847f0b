"""Which tensors share memory: outputs, arguments, parameters and attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.verification.nets import X, kinds
from torch import nn

from partita.verification import verify


@pytest.mark.parametrize(
    ("candidate", "reference"),
    [
        (lambda x: x[:1].clone(), lambda x: x[:1]),
        (lambda x: x[:1], lambda x: x[:1].clone()),
        (lambda x: x.clone(), lambda x: x),
        (lambda x: x.view_as(x), lambda x: x),
        (lambda x: (x * 2, x * 2), lambda x: 2 * ((x * 2),)),
        (lambda x: (lambda y: (y, y[:1].clone()))(x * 2), lambda x: (lambda y: (y, y[:1]))(x * 2)),
    ],
    ids=[
        "copy of view",
        "view of copy",
        "copy of input",
        "view of input",
        "two for one",
        "copy among outputs",
    ],
)
def test_who_shares_memory_with_whom_is_compared(
    candidate: Callable[..., Any], reference: Callable[..., Any]
) -> None:
    assert verify(reference, reference, (X,)).ok
    assert kinds(verify(candidate, reference, (X,))) == {"aliasing"}


def test_a_view_at_another_place_of_the_input_is_reported_even_where_values_are_equal() -> None:
    ones = torch.ones(4, 4)
    assert kinds(verify(lambda x: x[1], lambda x: x[0], (ones,))) == {"aliasing"}
    assert kinds(verify(lambda x: x[:, 0], lambda x: x[0], (ones,))) == {"aliasing"}


def test_a_parameter_that_is_returned_must_be_the_parameter() -> None:
    net = nn.Linear(2, 2)
    assert verify(lambda: net.weight, lambda: net.weight, ()).ok
    result = verify(lambda: net.weight.clone(), lambda: net.weight, ())
    assert "aliasing" in kinds(result)


def test_arguments_that_share_memory_still_do_in_the_copies() -> None:
    base = torch.zeros(4)

    def write(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        part += 1
        return whole.sum()

    result = verify(write, lambda whole, part: (part.add_(1), torch.tensor(2.0))[1], (base, base[:2]))
    assert result.ok, str(result)


def test_copies_of_an_attribute_that_each_call_makes_anew_need_only_be_equal() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x.sum()
            return x * 2

    class Twice(nn.Module):
        def __init__(self, off: float | None) -> None:
            super().__init__()
            self.first, self.second, self.off = Keeps(), Keeps(), off

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) if self.off is None else self.first(x) + 0 * self.second(x + self.off)

    kept = Keeps()
    both = Twice(0.0)
    both.second.seen = both.first.seen = kept.seen
    assert verify(both, kept, (X,)).ok
    stale = Twice(None)  # where one makes it, others may keep what they had
    stale.second.seen = stale.first.seen = kept.seen
    assert verify(stale, kept, (X,)).ok
    off = Twice(1.0)
    off.second.seen = off.first.seen = kept.seen
    assert "attribute" in kinds(verify(off, kept, (X,)))


def test_copies_of_an_attribute_that_is_written_to_drift_apart() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x + self.calls

    reference = Counts()
    cut = nn.Sequential(Counts(), nn.Identity())
    cut[1].calls = reference.calls
    cut[0].calls = reference.calls
    cut[1].forward = lambda x: x - 0 * cut[1].calls
    assert verify(cut, reference, (X,)).ok
    cut[1].calls = reference.calls.clone()
    assert kinds(verify(cut, reference, (X,))) >= {"aliasing"}
