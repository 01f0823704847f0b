"""What each thread of this process does, and what it waits for.

Each thread writes this down for itself, at the cost of two dictionary writes; only the watch thread reads it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

__all__ = ["WAITING", "Wait", "doing", "doing_now", "place_of"]

_NOWHERE = "code that is none of partita's"


class Wait(Protocol):
    """What a thread waits for. Its attributes are only computed when they are asked for.

    Attributes:
        comm_name: the name of the comm, the same on all of its ranks, and of no other comm.
        key: the operation, ``(kind, ...)``, unique in a comm.
        needs: the ranks of the comm without whose part the wait can't end.
    """

    @property
    def comm_name(self) -> str: ...

    @property
    def key(self) -> tuple[object, ...]: ...

    @property
    def needs(self) -> Sequence[int]: ...


WAITING: dict[int, Wait] = {}
"""By thread."""

_doing: dict[int, list[str]] = {}
_did: dict[int, str] = {}


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Note that the thread does `what` in this block, in words for other ranks."""
    thread = threading.get_ident()
    stack = _doing.setdefault(thread, [])
    stack.append(what)
    try:
        yield
    finally:
        _did[thread] = stack.pop()
        if not stack:
            del _doing[thread]


def doing_now(thread: int) -> str:
    """Return what that thread does, in words; empty where it runs code that is none of partita's."""
    stack = tuple(_doing.get(thread, ()))  # a copy: that thread goes on meanwhile
    return stack[0] if stack else ""


def place_of(thread: int) -> str:
    """Return what that thread does, in words, also where it runs code that is none of partita's."""
    now = doing_now(thread)
    if now:
        return now
    did = _did.get(thread)
    return _NOWHERE if did is None else f"{_NOWHERE}, after {did}"


def _forget() -> None:
    """Forget all in a child that this process has forked: it has none of these threads."""
    for notes in (WAITING, _doing, _did):
        notes.clear()


os.register_at_fork(after_in_child=_forget)
