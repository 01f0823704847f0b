"""Times and sizes as people type them: ``3ms``, ``1.2s``, ``80GB``, ``512MiB``."""

from __future__ import annotations

import math
import re

from partita.errors import PlanError, UsageError
from partita.planning.hardware._sizes import read_bytes

__all__ = ["parse_bytes", "parse_count", "parse_seconds", "parse_seconds_list", "parse_share"]

_SECONDS = {"ps": 1e-12, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([^\s0-9.]*)\s*")
_LARGEST = 1e18
"""More seconds or bytes than any machine has: such a number is a slip of the finger."""


def parse_seconds(text: str, option: str) -> float:
    """Read a time; a plain number is in seconds.

    >>> parse_seconds("3ms", "--f"), parse_seconds("1.2s", "--f"), parse_seconds("2", "--f")
    (0.003, 1.2, 2.0)

    Raises:
        UsageError: what is no number, is negative or too large, or has an unknown unit.
    """
    number, unit = _split(text, option, "a time such as 3ms, 1.2s or 0.5")
    factor = _SECONDS.get(unit.replace("\N{GREEK SMALL LETTER MU}", "\N{MICRO SIGN}") or "s")
    if factor is None:
        raise UsageError(f"{option} is {text!r:.40}: there is no unit {unit!r}, use {', '.join(_SECONDS)}")
    return _within(number * factor, text, option)


def parse_seconds_list(text: str, option: str) -> tuple[float, ...]:
    """Read one time, or several between commas.

    >>> parse_seconds_list("1ms,2ms", "--f")
    (0.001, 0.002)
    """
    parts = text.split(",")
    if len(parts) > 1 and not all(map(str.strip, parts)):
        raise UsageError(f"{option} is {text!r:.40}: give a time such as 3ms at each place between commas")
    return tuple(parse_seconds(part, option) for part in parts)


def parse_bytes(text: str, option: str) -> int:
    """Read a size: GB are 10⁹ bytes, GiB are 2³⁰; a plain number is in bytes.

    >>> parse_bytes("80GB", "--memory"), parse_bytes("1.5 KiB", "--memory"), parse_bytes("7", "--memory")
    (80000000000, 1536, 7)

    Raises:
        UsageError: other text, or a size that no machine has.
    """
    try:
        return int(_within(read_bytes(text, option), text, option))
    except PlanError as error:
        raise UsageError(str(error)) from error


def parse_count(text: str, option: str) -> float:
    """Read a number above 0 that has no unit.

    Raises:
        UsageError: anything else.
    """
    number, unit = _split(text, option, "a number such as 4 or 4.5")
    if unit or not number:
        raise UsageError(f"{option} is {text!r:.40}: give a number above 0, without a unit")
    return _within(number, text, option)


def parse_share(text: str, option: str) -> float:
    """Read a share from 0 to 1, or to 100 %.

    >>> parse_share("0.6", "--weight-activation"), parse_share("60 %", "--weight-activation")
    (0.6, 0.6)

    Raises:
        UsageError: a number outside of this, or with another unit.
    """
    number, unit = _split(text, option, "a share such as 0.6 or 60%")
    share = number / 100 if unit == "%" else number
    if unit not in ("", "%") or share > 1:
        raise UsageError(f"{option} is {text!r:.40}: give a share from 0 to 1, or up to 100%")
    return share


def _split(text: str, option: str, wanted: str) -> tuple[float, str]:
    parts = _QUANTITY.fullmatch(text)
    if parts is None:
        raise UsageError(f"{option} is {text!r:.40}: give {wanted}")
    return float(parts[1]), parts[2]


def _within(value: float, text: str, option: str) -> float:
    if not math.isfinite(value) or value > _LARGEST:
        raise UsageError(f"{option} is {text!r:.40}: give at most {_LARGEST:.0e} seconds or bytes")
    return value
