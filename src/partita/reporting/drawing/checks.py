"""What all data of a report have in common: quantities are finite, and not negative."""

from __future__ import annotations

import math

from partita.errors import ReportError

__all__ = ["require_quantity"]


def require_quantity(owner: str, name: str, value: float) -> None:
    """Refuse a quantity that can't be one.

    Raises:
        ReportError: ``value`` is negative or not finite; the message names ``owner`` and ``name``.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ReportError(f"{owner}.{name} is {value}; give a finite number that is not negative.")
