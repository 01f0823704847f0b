"""The memory that the recordings of one recorder share, and who may still read from it.

A recording keeps the memory of what it returns as long as it lives. What it needed in between is free once it
is recorded, and a newer recording may return its results there. So a replay can overwrite what *newer*
recordings have returned, and never what older ones have::

    record 1     [ in between ][ returns ]
    record 2     [ returns    ]             takes the place that 1 needed in between
    replay 2     [ result     ]
    replay 1     [ overwrites ]             wrong, if somebody still reads the result of 2

Where regions are recorded in the order in which they run, nothing is ever overwritten. The order breaks when
a region is recorded anew, after those that run behind it (a parameter has moved), or when calls of several
kinds lie between one another (two batch sizes, both on the way to their backward passes).

Microbatches of a pipeline are under way together, and the same region runs for each. So there are several
pools, called slots. What a region does for a microbatch is recorded in the first slot where nobody needs the
memory of another one any more, once for each slot::

    1F1B     F0   F1   B0   F2   B1   F3   B2   ...
    slot     0    1    0    0    1    1    0
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

__all__ = ["Borrowed", "MemoryPool", "MemoryPools"]


class Borrowed(Protocol):
    """What a replay has handed out without copying it."""

    @property
    def is_read(self) -> bool:
        """Whether somebody still has it."""
        ...

    def give_up(self) -> None:
        """Copy it from the next replay on, where that can be: somebody keeps it for too long."""
        ...


class MemoryPool:
    """The list of what is handed out of a recorder's memory.

    >>> pool = MemoryPool()
    >>> pool.next_number(), pool.next_number()
    (1, 2)
    """

    def __init__(self) -> None:
        self._recordings = 0
        self._newest = 0
        self._out: dict[int, Borrowed] = {}

    def next_number(self) -> int:
        """Return the number of a recording that is about to be made: newer ones have larger numbers."""
        self._recordings += 1
        return self._recordings

    def hand_out(self, number: int, borrowed: Borrowed) -> None:
        """Note that the replay of recording ``number`` has handed this out."""
        self._out[number] = borrowed
        self._newest = max(self._newest, number)

    def endangered_by(self, number: int) -> Borrowed | None:
        """Return what a replay of recording ``number`` could overwrite while somebody has it."""
        if number >= self._newest:
            return None
        self._out = {newer: borrowed for newer, borrowed in self._out.items() if borrowed.is_read}
        self._newest = max(self._out, default=0)
        return self._out[self._newest] if self._newest > number else None


class MemoryPools(defaultdict[int, MemoryPool]):
    """The pools of a recorder, by slot.

    >>> MemoryPools()[2].next_number()
    1
    """

    def __init__(self) -> None:
        super().__init__(MemoryPool)
