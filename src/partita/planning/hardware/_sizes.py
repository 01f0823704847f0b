"""Sizes as people write them: ``80GB``, ``512MiB``, or a number of bytes."""

from __future__ import annotations

import re
from decimal import Decimal

from partita.errors import PlanError
from partita.planning._check import require_amount

__all__ = ["read_bytes", "write_bytes"]

_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate("kmgtp", 1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_DECIMAL_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{0,18})?)\s*([A-Za-z]*)\s*")


def read_bytes(size: int | str, what: str) -> int:
    """How many bytes a size is; GB are 10⁹ of them, GiB 2³⁰.

    Raises:
        PlanError: text that is no size, or a number that is negative or not whole.

    >>> read_bytes("1.5 KiB", "memory"), read_bytes("80GB", "memory"), read_bytes(7, "memory")
    (1536, 80000000000, 7)
    """
    if not isinstance(size, str):
        require_amount(size, what)
        return size
    parts = _SIZE.fullmatch(size)
    unit = _UNITS.get(parts[2].lower()) if parts else None
    if parts is None or unit is None:
        raise PlanError(f"{what} is {size!r:.40}: write it like 80GB, 512MiB or 1000")
    return round(float(parts[1]) * unit)


def write_bytes(size: int, digits: int | None = None) -> str:
    """Text that `read_bytes` reads, rounded to so many digits; exact where none are given.

    >>> write_bytes(48_200_000_000), write_bytes(8_112_091_136, digits=3), write_bytes(80)
    ('48.2 GB', '8.11 GB', '80 bytes')
    """
    if digits is not None:
        size = round(size, digits - len(str(size)))
    power = min((len(str(size)) - 1) // 3, len(_DECIMAL_UNITS) - 1)
    number = str(Decimal(size).scaleb(-3 * power))
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {_DECIMAL_UNITS[power]}"
