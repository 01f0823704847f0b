"""The baton that decides which rank of one process runs, and what all learn when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from partita.errors import DeadlockError
from partita.runtime.failures.failure import FailureRecord

__all__ = ["Baton"]


@dataclass
class _Rank:
    """The state of one rank."""

    go: threading.Event = field(default_factory=threading.Event)
    waits: str = ""
    needs: tuple[int, ...] = ()
    ready: Callable[[], bool] = lambda: True
    ended: bool = False
    closed: bool = False


class Baton:
    """Lets one of `size` threads run at a time. Only the thread that has the baton may call its methods, but
    for :meth:`join`, :meth:`start` and :meth:`fail`, so that none needs a lock.
    """

    def __init__(self, size: int) -> None:
        self._ranks = [_Rank() for _ in range(size)]
        self._all_ended = threading.Event()
        self._failure: FailureRecord | None = None
        self.original: BaseException | None = None

    def start(self) -> None:
        self._ranks[0].go.set()

    def join(self) -> None:
        """Block the caller, which is no rank, until all ranks have ended."""
        self._all_ended.wait()

    def take(self, rank: int) -> None:
        """Block until the rank may start: the first call of its thread."""
        self._ranks[rank].go.wait()

    def end(self, rank: int) -> None:
        """Pass the baton on for good: the last call of the rank's thread."""
        self._ranks[rank].ended = True
        if not self._pass_on():
            self._all_ended.set()

    def close(self, rank: int) -> None:
        """Note that `rank` communicates no more."""
        self._ranks[rank].closed = True

    def is_closed(self, rank: int) -> bool:
        return self._ranks[rank].closed

    def has_ended(self, rank: int) -> bool:
        return self._ranks[rank].ended

    def wait(self, rank: int, ready: Callable[[], bool], what: str, needs: tuple[int, ...]) -> None:
        """Let other ranks run until `ready()`."""
        self.check(rank)
        if ready():
            return
        me = self._ranks[rank]
        me.ready, me.waits, me.needs = ready, what, needs
        me.go.clear()
        self._pass_on()
        me.go.wait()
        me.ready, me.waits, me.needs = (lambda: True), "", ()
        if ready():
            return
        self.check(rank)
        gone = next(peer for peer in needs if self._has_left(peer))
        self.fail(gone, None, "")
        self.check(rank)

    def fail(self, rank: int, error: BaseException | None, where: str) -> None:
        """Make `error` (None: that it left) what the others learn of `rank`, unless one has failed before."""
        if self._failure is not None:
            return
        self.original = error
        self._failure = FailureRecord(rank, "left") if error is None else FailureRecord.of(rank, error, where)
        if error is None:
            self.original = self._failure.to_error()

    def check(self, rank: int) -> None:
        """Raise the failure of another rank, where there is one."""
        if self._failure is None:
            return
        if isinstance(self.original, DeadlockError) and self._failure.rank == rank:
            raise self.original
        raise self._failure.to_error()

    def _pass_on(self) -> bool:
        """Give the baton to the lowest-numbered rank that can go on; return False where all have ended."""
        waiting = [(number, rank) for number, rank in enumerate(self._ranks) if not rank.ended]
        if not waiting:
            return False
        for _, rank in waiting:
            if self._failure is not None or rank.ready() or any(map(self._has_left, rank.needs)):
                rank.go.set()
                return True
        lines = "\n".join(f"  rank {number} waits: {rank.waits}" for number, rank in waiting)
        ended = [number for number, rank in enumerate(self._ranks) if rank.ended]
        tail = f"\n  ranks {ended} have ended" if ended else ""
        first, rank = waiting[0]
        self.fail(first, DeadlockError(f"every rank waits for another:\n{lines}{tail}"), "the schedule")
        rank.go.set()
        return True

    def _has_left(self, rank: int) -> bool:
        return self._ranks[rank].ended or self._ranks[rank].closed
