"""A function mode is left, and the others stay on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from partita._torch.fake.suspended_mode import suspended


class _Counts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_that_is_left_sees_nothing_and_modes_within_it_and_around_it_do() -> None:
    around, own, within = _Counts(), _Counts(), _Counts()
    x = torch.ones(1)
    with around, own, within:
        with suspended(own):
            torch.add(x, x)
        assert (around.calls, own.calls, within.calls) == (1, 0, 1)
        torch.add(x, x)
    assert (around.calls, own.calls, within.calls) == (2, 1, 2)


def test_the_modes_are_as_they_were_after_an_error() -> None:
    own, within = _Counts(), _Counts()
    x = torch.ones(1)
    with own, within:
        try:
            with suspended(own):
                raise KeyError
        except KeyError:
            pass
        torch.add(x, x)
    torch.add(x, x)
    assert (own.calls, within.calls) == (1, 1)


def test_leaving_a_mode_that_is_not_on_changes_nothing() -> None:
    own = _Counts()
    with own, suspended(_Counts()):
        torch.add(torch.ones(1), 1)
    assert own.calls == 2
