"""Where the threads of this process are: what each of them does, and which wait it is in.

Written in passing by whoever waits, read by the watch thread alone. One note costs two dictionary writes.
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
    """What a thread waits for. Nothing of it is worked out before somebody asks.

    Attributes:
        comm_name: of the comm; the same on all of its ranks, and of no other.
        key: the operation: ``(kind, ...)``, of which a comm never has two alike.
        needs: the ranks of the comm without whose part it can't end.
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
    """In this block the thread does `what`, in words that other ranks are shown."""
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
    """What that thread does, in words; empty where it runs code that is none of partita's."""
    stack = tuple(_doing.get(thread, ()))  # a copy: that thread goes on meanwhile
    return stack[0] if stack else ""


def place_of(thread: int) -> str:
    """Likewise, with words for that too."""
    now = doing_now(thread)
    if now:
        return now
    did = _did.get(thread)
    return _NOWHERE if did is None else f"{_NOWHERE}, after {did}"


def _forget() -> None:
    """In a child that this process has forked, none of this is so."""
    for notes in (WAITING, _doing, _did):
        notes.clear()


os.register_at_fork(after_in_child=_forget)
