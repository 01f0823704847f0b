"""What was worked out for rows of passes, for as long as few enough of them are remembered."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from partita.planning.searching.orders.clock import Pass

__all__ = ["RowsMemo"]

_V = TypeVar("_V")
_PASSES_KEPT = 4_000_000
"""A search goes on with few rows at a time; those of large steps take 100 bytes a pass."""


class RowsMemo(Generic[_V]):
    """Remembers values by rows and a key. Rows are the same where their lists are: nobody changes one."""

    def __init__(self, passes_kept: int = _PASSES_KEPT) -> None:
        self._passes_kept = passes_kept
        self._passes = 0
        self._values: dict[tuple[int, ...], tuple[list[Sequence[Pass]], dict[Hashable, _V]]] = {}

    def of(self, rows: Sequence[Sequence[Pass]]) -> dict[Hashable, _V]:
        """The values of these rows by key, to look up and to add to."""
        entry = self._values.get(ids := tuple(map(id, rows)))
        if entry is None:
            passes = sum(map(len, rows))
            if self._passes + passes > self._passes_kept:
                self._values.clear()
                self._passes = 0
            self._passes += passes
            # The lists are kept as well: another one could get their number.
            entry = self._values[ids] = (list(rows), {})
        return entry[1]
