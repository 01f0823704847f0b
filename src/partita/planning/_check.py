"""The guards that planning's dataclasses share: each names the value and what is allowed."""

from __future__ import annotations

import sys

from partita.errors import PlanError

__all__ = [
    "require_amount",
    "require_bandwidth",
    "require_copies",
    "require_count",
    "require_part",
    "require_rate",
    "require_seconds",
]

_MOST_COPIES = 1_000_000


def require_count(value: int, what: str, least: int = 1) -> None:
    """Raise PlanError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{what} is {value!r}: give a whole number of at least {least}")


def require_amount(value: int, what: str) -> None:
    """Raise PlanError unless `value` is a whole number of bytes (or of parameters), not negative."""
    require_count(value, what, least=0)


def require_seconds(value: float, what: str) -> None:
    """Raise PlanError unless `value` is a finite number of seconds, not negative."""
    _require_not_negative(value, what, "number of seconds")


def require_part(value: float, what: str) -> None:
    """Raise PlanError unless `value` is a part of something, such as 0.25; it may exceed 1."""
    _require_not_negative(value, what, "number")


def require_copies(value: float, what: str) -> None:
    """Raise PlanError unless parameters may count so often for their gradients and the optimizer's state."""
    require_part(value, what)
    if value > _MOST_COPIES:
        raise PlanError(f"{what} is {value!r}: give at most {_MOST_COPIES}, such as 4 for Adam")


def require_bandwidth(value: float, what: str) -> None:
    """Raise PlanError unless `value` is a number of bytes per second above 0; infinity is one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise PlanError(f"{what} is {value!r:.60}: give a number above 0, or infinity")


def require_rate(value: float, what: str) -> None:
    """Raise PlanError unless `value` is a finite number above 0, such as a speed."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise PlanError(f"{what} is {value!r:.60}: give a finite number above 0")


def _require_not_negative(value: float, what: str, kind: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max:  # false for what is not a number, too
        raise PlanError(f"{what} is {value!r:.60}: give a finite {kind}, 0 or more")
