"""Shortens a list of module names to what fits into a table."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["summarise_modules"]


def summarise_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Neighbours that differ only in a last number, counting up, become one range.

    >>> summarise_modules(["embed", "layers.0", "layers.1", "layers.2", "norm"])
    ('embed', 'layers.0-2', 'norm')
    """
    runs: list[tuple[str, int | None, int]] = []  # (prefix or whole name, first number, last number)
    for name in names:
        prefix, _, last = name.rpartition(".")
        if not (prefix and last.isascii() and last.isdigit()):
            runs.append((name, None, 0))
            continue
        number = int(last)
        if runs and runs[-1][0] == prefix and runs[-1][1] is not None and runs[-1][2] + 1 == number:
            runs[-1] = (prefix, runs[-1][1], number)
        else:
            runs.append((prefix, number, number))
    return tuple(_written(*run) for run in runs)


def _written(prefix: str, first: int | None, last: int) -> str:
    if first is None:
        return prefix
    return f"{prefix}.{first}" if first == last else f"{prefix}.{first}-{last}"
