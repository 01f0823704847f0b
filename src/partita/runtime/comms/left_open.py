"""Comms that nobody closes: their user is gone, and they wait for the moment at which closing is safe.

Each holds connections and threads. When a user is collected is no moment for all ranks: the others may still
be in the last call that they share with it. They are not when the process makes its next comm, since there
all ranks meet.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Protocol

__all__ = ["close_after", "close_left_open"]


class _Released(Protocol):
    def release(self) -> None: ...


_left_open: deque[_Released] = deque()


def close_after(user: object, comm: _Released) -> None:
    """Close ``comm``, which is ``user``'s alone, if that is gone when the process makes its next comm."""
    # No more than a note: a collector runs in any thread, at any point of its work.
    weakref.finalize(user, _left_open.append, comm).atexit = False


def close_left_open() -> None:
    """Close the comms whose user is gone. Called when all ranks have met for another one."""
    while _left_open:
        _left_open.popleft().release()
