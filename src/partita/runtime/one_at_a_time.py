"""One thread at a time on a comm: messages do not say which call of a rank they belong to."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from partita.errors import ExecutionError
from partita.runtime.comms.comm import Comm

__all__ = ["one_at_a_time", "without_other_ranks"]


@dataclass(frozen=True, eq=False)
class _Call:
    what: str
    thread: threading.Thread
    indivisible: bool
    local: bool = False


_under_way: WeakKeyDictionary[object, _Call] = WeakKeyDictionary()


@contextmanager
def one_at_a_time(
    comm: Comm, what: str, stages: Iterable[object] = (), *, indivisible: bool = False
) -> Iterator[None]:
    """Refuse the block where a call of another thread is under way on the comm, whose messages it would take
    for its own, or on one of the stages. Calls of one thread may be parts of each other.

    Args:
        what: this rank's call, in words.
        stages: what the call runs.
        indivisible: no other call is part of this one: each rank calls the user's functions when it comes
            to them, alone.

    Raises:
        ExecutionError: one is under way. It is published, since the other ranks wait for this call.
    """
    call = _Call(what, threading.current_thread(), indivisible)
    begun: list[object] = []
    try:
        for shared in (comm, *stages):
            other = _under_way.setdefault(shared, call)
            if other is call:
                begun.append(shared)
            elif other.thread is not call.thread or (other.indivisible and comm.size > 1):
                error = _refusal(comm, call, other)
                if not other.local:
                    comm.fail(error, what)
                raise error
        yield
    finally:
        for shared in begun:
            del _under_way[shared]


@contextmanager
def without_other_ranks(comm: Comm, what: str) -> Iterator[bool]:
    """Refuse calls on the comm within this block, and don't tell the other ranks, which run no such block.

    Yields:
        False, and nothing is refused, where a call is under way already.
    """
    call = _Call(what, threading.current_thread(), indivisible=True, local=True)
    first = _under_way.setdefault(comm, call) is call
    try:
        yield first
    finally:
        if first:
            del _under_way[comm]


def _refusal(comm: Comm, call: _Call, other: _Call) -> ExecutionError:
    if other.thread is call.thread:
        return ExecutionError(
            f"rank {comm.rank} is to run {call.what} within its {other.what} (a loss_fn, a hook or the model "
            "calls it), where the other ranks do not come: call it between two steps, on every rank"
        )
    return ExecutionError(
        f"rank {comm.rank} is to run {call.what} in thread {call.thread.name!r}, while its {other.what} is "
        f"under way in thread {other.thread.name!r}: end one call before the next begins, on every rank in "
        "the same order (a queue that one thread works off), or give each thread stages and a schedule of "
        "its own"
    )
