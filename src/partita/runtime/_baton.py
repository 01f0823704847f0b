"""Who runs: the baton that the ranks of one process hand on, and what becomes of all when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from partita.errors import DeadlockError
from partita.runtime.failure import FailureRecord

__all__ = ["Baton"]


@dataclass
class _Rank:
    """What the world knows of one rank."""

    go: threading.Event = field(default_factory=threading.Event)
    waits: str = ""
    needs: tuple[int, ...] = ()
    ready: Callable[[], bool] = lambda: True
    ended: bool = False
    closed: bool = False


class Baton:
    """Lets one of `size` threads run at a time. But for :meth:`join`, :meth:`start` and :meth:`fail`, only
    the thread that holds the baton may call it, so nothing here needs a lock.
    """

    def __init__(self, size: int) -> None:
        self._ranks = [_Rank() for _ in range(size)]
        self._all_ended = threading.Event()
        self._failure: FailureRecord | None = None
        self.original: BaseException | None = None

    def start(self) -> None:
        """Gives the baton to rank 0."""
        self._ranks[0].go.set()

    def join(self) -> None:
        """Blocks the caller, who is no rank, until all ranks have ended."""
        self._all_ended.wait()

    def take(self, rank: int) -> None:
        """The first call of each rank's thread: blocks until it may start."""
        self._ranks[rank].go.wait()

    def end(self, rank: int) -> None:
        """The last call of each rank's thread."""
        self._ranks[rank].ended = True
        if not self._pass_on():
            self._all_ended.set()

    def close(self, rank: int) -> None:
        """Notes that `rank` communicates no more."""
        self._ranks[rank].closed = True

    def is_closed(self, rank: int) -> bool:
        """Whether `rank` has closed its comm."""
        return self._ranks[rank].closed

    def has_ended(self, rank: int) -> bool:
        """Whether the thread of `rank` is over."""
        return self._ranks[rank].ended

    def wait(self, rank: int, ready: Callable[[], bool], what: str, needs: tuple[int, ...]) -> None:
        """Returns when `ready()`; lets other ranks run until then."""
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
        """Makes `error` (None: that it left) what all other ranks learn of `rank`, unless there is a failure
        already.
        """
        if self._failure is not None:
            return
        self.original = error
        self._failure = FailureRecord(rank, "left") if error is None else FailureRecord.of(rank, error, where)
        if error is None:
            self.original = self._failure.to_error()

    def check(self, rank: int) -> None:
        """Raises what `rank` must learn of a failure."""
        if self._failure is None:
            return
        if isinstance(self.original, DeadlockError) and self._failure.rank == rank:
            raise self.original
        raise self._failure.to_error()

    def _pass_on(self) -> bool:
        """Gives the baton to the lowest-numbered rank that can go on. False: all have ended."""
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
