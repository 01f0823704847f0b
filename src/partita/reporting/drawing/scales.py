"""From values to pixels: linear scales, and ticks at round numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from partita.errors import ReportError

__all__ = ["Scale", "format_tick", "ticks"]

_LEAST_SPAN = 1e-300  # below that, steps are lost to underflow


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight line from ``[low, high]`` to ``[start, end]`` pixels; an empty domain maps to the middle.

    >>> Scale(0.0, 10.0, 100.0, 200.0)(2.5)
    125.0
    """

    low: float
    high: float
    start: float
    end: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ReportError(
                f"A scale from {self.low} to {self.high} can't be drawn; give finite bounds in order."
            )

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, about: int) -> tuple[float, ...]:
    """Choose at most `about` + 1 round numbers (1, 2 or 5 times a power of ten apart) in ``[low, high]``.

    >>> ticks(0.0, 97.0, 5)
    (0.0, 20.0, 40.0, 60.0, 80.0)
    """
    span = high - low
    if span <= _LEAST_SPAN or not math.isfinite(span):
        return (low,)
    step = _round_step(span / about)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Multiplied, not added up, so that errors do not add up either; 0.0 is added to turn -0.0 into 0.0.
    return tuple(round(index * step, 12 - _magnitude(step)) + 0.0 for index in range(first, last + 1))


def format_tick(value: float, step: float) -> str:
    """Return a tick's label, with as many decimals as the distance to the next one needs.

    >>> format_tick(2.5, 0.5), format_tick(1200.0, 200.0)
    ('2.5', '1,200')
    """
    decimals = max(0, -_magnitude(step)) if step > 0 else 2
    if abs(value) >= 1e6 or decimals > 6:
        return f"{value:.3g}"
    return f"{value:,.{decimals}f}"


def _round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** _magnitude(least)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _magnitude(value: float) -> int:
    return math.floor(math.log10(value) + 1e-12)
