"""How one rank's failure reaches all others. Every two ranks of a comm hold a connection for messages about
failures, and one thread a process reads them.

::

    rank 1 raises           rank 0 (waits for 2)               rank 2 (computes)
    tells 0 and 2 --------- hears it ------------------------- hears it
    closes its data         closes its data connections        closes its data connections
    connections             wait() ends: PeerFailed(1)         next call: PeerFailed(1)

A killed rank tells nothing, but the system closes its connections; and on one machine its process is
watched, since children that it has forked may keep them open (:mod:`~partita.runtime.failures.processes`).
A host that is gone does not answer the kernel's probes (:mod:`~partita.runtime.failures.connections`). Only
what was seen in one of these ways is blamed on a rank. The rank that sees it tells all others, and of
several failures within a tenth of a second all ranks take the same.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from partita.runtime.failures.connections import Connection
from partita.runtime.failures.failure import FailureRecord
from partita.runtime.failures.processes import LocalProcesses
from partita.runtime.failures.stalls import STALLS
from partita.runtime.failures.watch import WATCH

__all__ = ["FailureDetector", "Team"]

_DECIDE_S = 0.1
"""So long a rank that has heard of a failure waits for another that counts more."""

_CAUSE_S = 5.0
"""How long a rank whose data connection broke waits to hear why."""

_DRAIN_S = 0.3
_FLUSH_S = 0.5
_IDLE_S = 3600.0
_COLLECTIVES = 1000
"""So many of a rank's collectives are remembered: more than one rank can be ahead of another."""


@dataclass(frozen=True)
class Team:
    """The ranks of a comm.

    Attributes:
        name: of the comm; the same on all of its ranks, and of no other comm.
        rank: this one.
        processes: for each rank a number that its process has in all comms.
        lost_after_s: after so many seconds without an answer a host is lost.
    """

    name: str
    rank: int
    processes: tuple[int, ...]
    lost_after_s: float


class FailureDetector:
    """Sees the failures of the other ranks, and tells them of this one's.

    Args:
        connections: to each other rank.
        local: the processes of the ranks on this machine.
        on_failure: called once, from whichever thread learns first; must end this rank's blocked operations.

    Attributes:
        failure: the failure of the comm, once there is one.
        began: how many operations of each kind this rank has begun: ``("sent", peer, tag)``, ``("received",
            peer, tag)``, ``("collective", ranks)``.
        thread: the thread that used the comm last.
    """

    def __init__(
        self,
        team: Team,
        connections: Mapping[int, Connection],
        local: LocalProcesses,
        on_failure: Callable[[], None],
    ) -> None:
        self.team = team
        self.failure: FailureRecord | None = None
        self.began: dict[tuple[Any, ...], int] = {}
        self._collectives: deque[tuple[Any, ...]] = deque(maxlen=_COLLECTIVES)
        self.thread = threading.get_ident()
        self._connections = dict(connections)
        self._ranks = {connection.handle: rank for rank, connection in connections.items()}
        self._local = local
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._heard: list[FailureRecord] = []
        self._decides_at: float | None = None
        self._left: dict[int, dict[tuple[Any, ...], int]] = {}
        self._has_left = False
        self._reported: set[int] = set()

    # Called by the comm.

    def start(self) -> None:
        """Begin to watch the other ranks."""
        STALLS.add(self)
        WATCH.add(self)

    def stop(self) -> None:
        """Send what is unsent, and close the connections."""
        self._wait(lambda: not any(one.has_unsent for one in self._open()), _FLUSH_S)
        for connection in self._open():
            connection.end()
        self._wait(lambda: not self._connections, 0.0 if self.failure is None else _DRAIN_S)
        STALLS.remove(self)
        WATCH.remove(self)
        self._release()

    def publish(self, record: FailureRecord) -> None:
        """Make `record` the failure that all ranks learn of, unless there is one already."""
        with self._lock:
            self._heard.append(record)
        self._decide()

    def explain(self, peers: Collection[int], where: str) -> FailureRecord | None:
        """Return why a connection broke in an operation with `peers`: the failure that all ranks learn of, or
        None where nobody has seen one.
        """
        end = time.monotonic() + _CAUSE_S
        while not self._decided.wait(0.02) and time.monotonic() < end:
            gone = sorted(set(peers) & set(self._left))
            if gone and self._decides_at is None:
                if not self._decided.wait(2 * _DECIDE_S):
                    self.publish(FailureRecord(gone[0], "left", where))
                break
        return self.failure

    def leave(self, *, ending: bool) -> None:
        """Tell the others that this rank leaves without a failure.

        Args:
            ending: the process ends.
        """
        self._has_left = True
        for rank, connection in list(self._connections.items()):
            counts = [[list(key), n] for key, n in self.began.items() if _concerns(key, rank)]
            connection.send({"left": counts, "ending": ending})

    @property
    def leavers(self) -> Collection[int]:
        """The ranks that have closed the comm, or ended."""
        return self._left

    def wait_until_all_left(self, seconds: float) -> None:
        """Return when every rank has left, one has failed, or `seconds` are over."""
        others = set(range(len(self.team.processes))) - {self.team.rank}
        self._wait(lambda: self.failure is not None or others <= set(self._left), seconds)

    def has_come(self, peer: int, key: tuple[Any, ...]) -> bool:
        """Whether this rank has begun its part of an operation that `peer` waits for. A rank whose collective
        of that number is another one has not: it has gone another way.
        """
        return _has_come(self.began, peer, key) and not any(
            one[:3] == key[:3] and one != key for one in tuple(self._collectives)
        )

    def note_collective(self, key: tuple[Any, ...]) -> None:
        """Note which collective this rank has begun: ``("collective", ranks, number, what)``."""
        self._collectives.append(key)

    def left_without(self, peer: int, key: tuple[Any, ...]) -> bool:
        """Whether `peer` has left and had not begun its part of an operation of this rank."""
        return peer in self._left and not _has_come(self._left[peer], self.team.rank, key)

    def send(self, peer: int, message: dict[str, Any]) -> bool:
        """Send a message to a rank; return False where there is no connection."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.send(message)
        return connection is not None

    # Called by the watch thread: see `partita.runtime.failures.watch.Watched`.

    def handles(self) -> Mapping[int, int]:
        events = dict.fromkeys(self._local.handles, select.POLLIN)
        for connection in self._open():
            events[connection.handle] = select.POLLIN | (select.POLLOUT if connection.has_unsent else 0)
        return events

    @property
    def due_s(self) -> float:
        return _IDLE_S if self._decides_at is None else self._decides_at - time.monotonic()

    def ready(self, handle: int) -> None:
        rank = self._ranks.get(handle)
        if rank is None:
            for gone in self._local.gone() & self._connections.keys():
                self._read(gone)  # its last words first
                if gone in self._connections:
                    self._ended(gone, "closed")
        elif rank in self._connections:
            self._read(rank)

    def tick(self, now: float) -> None:
        if self._decides_at is not None and now >= self._decides_at:
            self._decide()

    def broke(self, error: Exception) -> None:
        self.publish(FailureRecord.of(self.team.rank, error, "the watch over the other ranks"))

    def forget(self) -> None:
        self._release()

    def hear(self, record: FailureRecord) -> None:
        """Take note of a failure that was seen here, or that another rank has told of."""
        if self.failure is not None:
            return
        with self._lock:
            self._heard.append(record)
            if self._decides_at is None:
                self._decides_at = time.monotonic() + _DECIDE_S

    # Inside.

    def _open(self) -> list[Connection]:
        return list(self._connections.values())

    def _read(self, rank: int) -> None:
        connection = self._connections[rank]
        connection.flush()
        messages, end = connection.receive()
        for message in messages:
            self._take(rank, message)
        if end is not None:
            self._ended(rank, end)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._reported.add(rank)
            self.hear(FailureRecord(**message["failed"]))
        elif "left" in message:
            self._left[rank] = {_key(key): n for key, n in message["left"]}
            if message["ending"]:
                STALLS.gone[self.team.processes[rank]] = "left"
        else:
            STALLS.take(self, rank, message)

    def _ended(self, rank: int, how: str) -> None:
        """Conclude from the end of a connection what has become of a rank."""
        connection = self._connections.pop(rank)
        connection.close()
        if how == "closed" and self._has_left and rank not in self._local.gone():
            self._left.setdefault(rank, {})  # a rank that hears of this one's leaving closes its end
        if how == "closed" and rank in self._left:
            return
        process = self.team.processes[rank]
        if how != "closed":
            STALLS.gone[process] = "lost"
        elif rank in self._local.gone() or not (self._heard or rank in self._reported):
            STALLS.gone[process] = "died"  # ranks close a comm that has failed, and may make another
        if rank in self._reported:
            return
        if how == "closed":
            self.hear(FailureRecord(rank, "died"))
        else:
            summary = f"its host has not answered for {self.team.lost_after_s:g} s"
            self.hear(FailureRecord(rank, "lost", summary=summary))

    def _decide(self) -> None:
        with self._lock:
            self._decides_at = None
            if self.failure is not None or not self._heard:
                return
            record = self.failure = min(self._causes(), key=lambda heard: heard.order)
        for connection in self._open():
            connection.send({"failed": asdict(record)})
        self._decided.set()
        self._on_failure()

    def _causes(self) -> list[FailureRecord]:
        """Return what was heard, without the leaving of ranks that a deadlock had ended."""
        rings = [set(heard.ring) for heard in self._heard if heard.kind == "deadlock"]
        return [
            heard
            for heard in self._heard
            if heard.kind != "left" or not any(self.team.processes[heard.rank] in ring for ring in rings)
        ]

    def _wait(self, is_done: Callable[[], bool], seconds: float) -> None:
        pause = threading.Event()
        end = time.monotonic() + seconds
        while not is_done() and time.monotonic() < end:
            pause.wait(0.005)

    def _release(self) -> None:
        for connection in self._open():
            with suppress(OSError):
                connection.close()
        self._connections.clear()
        self._local.close()


def _key(key: Any) -> tuple[Any, ...]:
    """Return an operation's key as it was before JSON made lists of its tuples."""
    return tuple(_key(part) if isinstance(part, list) else part for part in key)


def _concerns(key: tuple[Any, ...], rank: int) -> bool:
    return rank in key[1] if key[0] == "collective" else key[1] == rank


_PARTS = {"recv from": "sent", "send to": "received"}


def _has_come(began: Mapping[tuple[Any, ...], int], waiting: int, key: tuple[Any, ...]) -> bool:
    """Whether a rank that has begun these operations has begun its part of the operation that the rank
    ``waiting`` waits for.

    Args:
        key: ``("recv from", peer, tag, number)``, ``("send to", peer, tag, number)``, or ``("collective",
            ranks, number, what)``.
    """
    if key[0] in _PARTS:
        _, _, tag, number = key
        return began.get((_PARTS[key[0]], waiting, tag), 0) >= number
    _, ranks, number, _ = key
    return began.get(("collective", ranks), 0) >= number
