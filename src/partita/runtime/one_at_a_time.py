"""One thread at a time on a comm: messages do not say which call of a rank they belong to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from partita.errors import ExecutionError
from partita.runtime.comms.comm import Comm

__all__ = ["one_at_a_time"]


@dataclass(frozen=True, eq=False)
class _Call:
    what: str
    thread: threading.Thread


_under_way: WeakKeyDictionary[Comm, _Call] = WeakKeyDictionary()


@contextmanager
def one_at_a_time(comm: Comm, what: str) -> Iterator[None]:
    """Refuse the block where a call of another thread is under way on the comm, whose messages it would take
    for its own. Calls of one thread may be parts of each other.

    Args:
        what: this rank's call, in words.

    Raises:
        ExecutionError: one is under way. It is published, since the other ranks wait for this call.
    """
    call = _Call(what, threading.current_thread())
    other = _under_way.setdefault(comm, call)
    if other.thread is not call.thread:
        error = ExecutionError(
            f"rank {comm.rank} is to run {what} in thread {call.thread.name!r}, while its {other.what} is "
            f"under way in thread {other.thread.name!r}: end one call before the next begins, on every rank "
            "in the same order (a queue that one thread works off), or give each thread a schedule of its own"
        )
        comm.fail(error, what)
        raise error
    try:
        yield
    finally:
        if other is call:
            del _under_way[comm]
