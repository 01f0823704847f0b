"""How one rank's failure reaches all others: a record in the store, and two threads a rank that look out for
it.

::

    rank 1 raises           rank 0 (waits for 2)               rank 2 (computes)
    publish record ──────── store ──────────────────────────── store
    close its connections   lookout sees the record            lookout sees the record
                            closes its connections             closes its connections
                            wait() ends: PeerFailed(1)         next call: PeerFailed(1)

A killed rank publishes nothing, but the system closes its sockets. So every rank keeps one receive open to
its right-hand neighbour that is never answered: when it ends, the neighbour is gone, and the record is
written in its name. On one machine ranks also watch each other's processes
(:mod:`~partita.runtime.processes`).

A rank that computes hears of it only when its lookout next asks. The process that hosts the store must not
end before, for the record would be lost with it: each rank notes that it knows, and a rank that ends after a
failure first waits a moment for these notes.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal

import torch

from partita._torch.distributed import RawGroup, Store, abort_gloo
from partita.errors import PeerFailed
from partita.runtime.processes import NearProcesses, own_machine

__all__ = ["FailureRecord", "Lookout", "announce"]

_POLL_S = 0.2
"""How often a lookout asks the store: a failure is seen within this time."""

_CAUSE_S = 1.0
"""How long a rank whose connection broke waits for somebody to say why, before it takes the peer for dead."""

_JOIN_S = 5.0
_WATCH_TAG = 1
_FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class FailureRecord:
    """Who failed first, and how. Travels as JSON.

    Attributes:
        rank: the rank that failed.
        kind: ``raised`` an exception, ``left`` while others needed it, or ``died`` without a word.
        where: what it was doing.
        summary: the exception's type and text, one line.
        traceback_text: its traceback; empty unless it raised.
    """

    rank: int
    kind: Literal["raised", "left", "died"]
    where: str = ""
    summary: str = ""
    traceback_text: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException, where: str) -> FailureRecord:
        """The record of `error`, raised on `rank`. A PeerFailed is passed on under the rank that it names."""
        if isinstance(error, PeerFailed):
            return cls(
                error.rank,
                "raised" if error.traceback_text else "died",
                where,
                str(error),
                error.traceback_text,
            )
        summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        return cls(rank, "raised", where, summary, "".join(traceback.format_exception(error)))

    def to_error(self) -> PeerFailed:
        """What the other ranks raise."""
        if self.kind == "raised":
            message = f"rank {self.rank} failed in {self.where}: {self.summary}\n\n{self.traceback_text}"
        elif self.kind == "left":
            message = (
                f"rank {self.rank} left while another rank still waited for it: check that all ranks take "
                "the same number of steps and close together"
            )
        else:
            message = (
                f"rank {self.rank} died without a word (killed?): look at that process's own output, "
                "its exit status and the system's log (out of memory?)"
            )
        return PeerFailed(message, self.rank, self.traceback_text)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FailureRecord:
        """The record that :meth:`to_json` wrote."""
        return cls(**json.loads(text))


def announce(store: Store, rank: int) -> None:
    """Tells the lookouts on this machine which process this rank is. To be called before the ranks meet."""
    machine = own_machine()
    if machine:
        place = store.add(f"near/{machine}", 1)
        store.set(f"near/{machine}/{place}", f"{rank} {os.getpid()}")


class Lookout:
    """One rank's view of the failure record.

    Args:
        store: a connection that nothing else blocks on. Keys are written below the caller's prefix; every
            rank has called `announce` on it.
        watch: a gloo group of all ranks that carries nothing else; None where there is only one rank.
        on_failure: called once, from whichever thread learns first; must end this rank's blocked operations.
    """

    def __init__(
        self, store: Store, rank: int, size: int, watch: RawGroup | None, on_failure: Callable[[], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._watch = watch
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failure: FailureRecord | None = None

    def start(self) -> None:
        """Starts both threads. They are daemons: neither keeps a process alive."""
        if self._watch is None:
            return
        for target in (self._poll_store, self._watch_neighbours):
            thread = threading.Thread(target=target, name=f"partita-{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ends both threads and closes the watch group's connections.

        The threads are joined: one that came out of C++ while the interpreter shuts down would abort the
        process.
        """
        self._stopped.set()
        if self._watch is not None:
            abort_gloo(self._watch)
        for thread in self._threads:
            thread.join(_JOIN_S)

    def publish(self, record: FailureRecord) -> None:
        """Makes `record` the failure that all ranks learn of, unless there is one already."""
        with suppress(RuntimeError):  # the store itself may be what died; then this rank still knows
            self._store.compare_set("failure", "", record.to_json())
            record = self._read() or record
        self._learn(record)

    def explain(self, peer: int) -> FailureRecord:
        """Why a connection to `peer` broke: the published failure, or `peer` itself. Makes sure that all
        ranks learn.
        """
        found = self._read_or_host_loss()
        if found is None and not self.has_left(peer):
            self._known.wait(_CAUSE_S)
            found = self.failure or self._read_or_host_loss()
        if found is None:
            found = FailureRecord(peer, "left" if self.has_left(peer) else "died")
            self.publish(found)
        self._learn(found)
        return self.failure or found

    def leave(self) -> None:
        """Notes in the store that this rank has left in the ordinary way."""
        with suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "1")
        self._need_not_be_told()

    def has_left(self, peer: int) -> bool:
        """Whether `peer` closed its comm."""
        try:
            return self._store.check([f"left/{peer}"])
        except RuntimeError:
            return False

    def wait_until_all_left(self, seconds: float) -> bool:
        """Returns when every rank has left, one has failed, the store is gone, or `seconds` are over.

        Returns:
            False only where the time was over and somebody is still there.
        """
        keys = [f"left/{rank}" for rank in range(self._size)]
        return self._wait(lambda: self.failure is not None or self._store.check(keys), seconds)

    def wait_until_all_know(self, seconds: float) -> None:
        """After a failure: returns when every rank that lives has heard of it or has left before, the store
        is gone, or `seconds` are over.
        """
        assert self.failure is not None
        dead = self.failure.rank if self.failure.kind == "died" else None
        keys = [f"told/{rank}" for rank in range(self._size) if rank != dead]
        self._wait(lambda: self._store.check(keys), seconds)

    def _wait(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Whether it is done, or will never be since the store is gone, before `seconds` are over."""
        pause = threading.Event()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if is_done():
                    return True
            except RuntimeError:
                return True
            pause.wait(0.02)
        return False

    def _need_not_be_told(self) -> None:
        with suppress(RuntimeError):
            self._store.set(f"told/{self._rank}", "1")

    def _read(self) -> FailureRecord | None:
        if not self._store.check(["failure"]):
            return None
        return FailureRecord.from_json(self._store.get("failure").decode())

    def _read_or_host_loss(self) -> FailureRecord | None:
        """Like :meth:`_read`; a store that can't be reached means that the process that hosts it, rank 0 as a
        rule, died. Where this is rank 0, it was another one: which, the connections tell.
        """
        try:
            return self._read()
        except RuntimeError:
            if self.failure is not None or self._rank == 0:
                return self.failure
            return FailureRecord(0, "died")

    def _learn(self, record: FailureRecord) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = record
        self._known.set()
        self._on_failure()
        self._need_not_be_told()

    def _poll_store(self) -> None:
        """Asks for the record, and whether a process on this machine has ended."""
        near = self._near()
        while not self._stopped.wait(_POLL_S) and self.failure is None:
            record = self._read_or_host_loss()
            if record is not None and not self._stopped.is_set():
                self._learn(record)
                break
            for rank in near.gone():
                if not self._stopped.is_set() and not self.has_left(rank):
                    self.explain(rank)
        near.close()

    def _near(self) -> NearProcesses:
        """The processes of the ranks on this machine."""
        machine = own_machine()
        try:
            count = self._store.add(f"near/{machine}", 0) if machine else 0
            said = [self._store.get(f"near/{machine}/{place + 1}").split() for place in range(count)]
        except RuntimeError:  # the store is gone already, as the first poll will find
            return NearProcesses({})
        return NearProcesses({int(rank): int(number) for rank, number in said if int(rank) != self._rank})

    def _watch_neighbours(self) -> None:
        """Waits for the right-hand neighbour to go; for the next one where that one left without harm."""
        assert self._watch is not None
        for step in range(1, self._size):
            neighbour = (self._rank + step) % self._size
            with suppress(RuntimeError):
                self._watch.recv([torch.empty(1, dtype=torch.uint8)], neighbour, _WATCH_TAG).wait(_FOREVER)
            if self._stopped.is_set() or self.failure is not None:
                return
            if not self.has_left(neighbour):
                self.explain(neighbour)
                return
