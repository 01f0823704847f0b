"""Numbers as people read them: the same words in the terminal and in the page."""

from __future__ import annotations

import math

__all__ = [
    "format_bytes",
    "format_count",
    "format_loss",
    "format_number",
    "format_seconds",
    "format_share",
]

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS = ("", "k", "M", "G", "T")


def format_bytes(size: float) -> str:
    """Write a size in bytes with a binary unit.

    >>> format_bytes(512), format_bytes(1536), format_bytes(5 * 2**20)
    ('512 B', '1.50 KiB', '5.00 MiB')
    """
    return _with_unit(size, 1024, _BYTE_UNITS)


def format_count(count: float) -> str:
    """Write a count with a decimal prefix (k, M, G, T).

    >>> format_count(812), format_count(10_240_000)
    ('812', '10.2 M')
    """
    return _with_unit(count, 1000, _COUNT_UNITS)


def format_seconds(seconds: float) -> str:
    """Write a duration in the unit that suits it, from picoseconds to hours.

    >>> format_seconds(0.0000425), format_seconds(0.0123), format_seconds(1.5), format_seconds(125)
    ('42.5 µs', '12.3 ms', '1.50 s', '2 min 5 s')
    """
    if not math.isfinite(seconds):
        return f"{_not_finite(seconds)} s"
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60} min"
    if seconds >= 99.95:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60} s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("\u00b5s", 1e6), ("ns", 1e9), ("ps", 1e12)):
        if seconds * factor >= 0.9995:
            return f"{_three_digits(seconds * factor)} {unit}"
    return "0 ms" if seconds == 0 else "< 1 ps"


def format_share(share: float) -> str:
    """Write a share of one as a percentage.

    >>> format_share(0.2137)
    '21.4 %'
    """
    return f"{share * 100:.1f} %" if math.isfinite(share) else _not_finite(share)


def format_loss(loss: float) -> str:
    """Write a loss with five decimals, or the name of what it is instead of a number.

    >>> format_loss(2.5), format_loss(float("nan"))
    ('2.50000', 'NaN')
    """
    return f"{loss:.5f}" if math.isfinite(loss) else _not_finite(loss)


def format_number(value: float) -> str:
    """Write any number in short: an exact zero stays recognisable, the very small or large get an exponent.

    >>> format_number(0.0), format_number(0), format_number(1.5e-7), format_number(183.26), format_number(12)
    ('0.0', '0', '1.50e-07', '183', '12')
    """
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return _not_finite(value)
    if value == 0:
        return "0.0"
    size = abs(value)
    if size < 1e-3 or size >= 1e7:
        return f"{value:.2e}"
    return ("-" if value < 0 else "") + _three_digits(size)


def _with_unit(value: float, step: int, units: tuple[str, ...]) -> str:
    if not math.isfinite(value):
        return f"{_not_finite(value)} {units[0]}".strip()
    if value < 0:
        return "-" + _with_unit(-value, step, units)
    if value < step:
        return f"{value:.0f} {units[0]}".strip()
    power = 0
    # 0.9995: what would be rounded up to a full step is written in the next unit.
    while value >= 0.9995 * step and power < len(units) - 1:
        value /= step
        power += 1
    return f"{_three_digits(value)} {units[power]}".strip()


def _three_digits(value: float) -> str:
    """A number above zero, in three digits where it is below a thousand."""
    if value < 1e-3:
        return f"{value:.2e}"
    if value < 0.9995:
        return f"{value:.{2 - math.floor(math.log10(value))}f}"
    if value < 9.995:
        return f"{value:.2f}"
    if value < 99.95:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def _not_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "∞" if value > 0 else "-∞"
