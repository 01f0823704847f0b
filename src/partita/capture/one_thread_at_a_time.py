"""Threads that cut models take turns.

Tracing switches settings of the whole process, measuring and proving run the model and set torch's random
generator back, and a proof compares the process's generators before and after. What another thread traces,
measures or proves meanwhile would be found to differ.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["one_thread_at_a_time"]

_TURN = threading.RLock()


@contextmanager
def one_thread_at_a_time() -> Iterator[None]:
    """In this block, and in functions that it decorates, other threads wait where they come to such a block.

    >>> with one_thread_at_a_time(), one_thread_at_a_time():
    ...     pass  # one thread may enter several
    """
    with _TURN:
        yield
