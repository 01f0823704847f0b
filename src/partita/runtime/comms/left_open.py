"""Comms that nobody closes: their user is gone, and they wait for the moment at which closing is safe.

Each holds connections and threads. When a user is collected is no moment for all ranks: the others may still
be in the last call that they share with it. They are not when the process makes its next comm with them all,
since there they meet.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Protocol

__all__ = ["close_after", "close_left_open"]


class _Released(Protocol):
    @property
    def processes(self) -> tuple[int, ...]: ...

    def release(self) -> None: ...


_left_open: deque[_Released] = deque()


def close_after(user: object, comm: _Released) -> None:
    """Close ``comm``, ``user``'s alone, when that is gone and all processes of the comm have met again."""
    # No more than a note: a collector runs in any thread, at any point of its work.
    weakref.finalize(user, _left_open.append, comm).atexit = False


def close_left_open(processes: Collection[int]) -> None:
    """Close comms whose user is gone, of no others than these processes, which have met for another."""
    of_others = []
    for comm in _taken():
        if set(comm.processes) <= set(processes):
            comm.release()
        else:
            of_others.append(comm)
    _left_open.extend(of_others)


def _taken() -> Iterator[_Released]:
    with suppress(IndexError):  # none is left, or another thread has taken the last one
        while True:
            yield _left_open.popleft()
