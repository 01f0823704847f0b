"""How one rank's failure reaches all others: every two ranks of a comm hold a connection that carries nothing
but news, and one thread a process reads them.

::

    rank 1 raises           rank 0 (waits for 2)               rank 2 (computes)
    says so to 0 and 2 ---- hears it ------------------------- hears it
    closes its data         closes its data connections        closes its data connections
    connections             wait() ends: PeerFailed(1)         next call: PeerFailed(1)

A killed rank says nothing, but the system closes its connections; and on one machine its process is watched,
since children that it has forked may hold them (:mod:`~partita.runtime.processes`). A host that is gone does
not answer the kernel's probes (:mod:`~partita.runtime.connections`). Only what was seen in one of these ways
names a rank. Who has seen it tells all others, and of several failures within a tenth of a second all take
the same.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from partita.runtime.connections import Connection
from partita.runtime.failure import FailureRecord
from partita.runtime.processes import NearProcesses
from partita.runtime.stalls import STALLS
from partita.runtime.watch import WATCH

__all__ = ["Lookout", "Team"]

_SETTLE_S = 0.1
"""So long a rank that has heard of a failure waits for another that counts more."""

_CAUSE_S = 5.0
"""How long a rank whose data connection broke waits to hear why."""

_DRAIN_S = 0.3
_FLUSH_S = 0.5
_IDLE_S = 3600.0


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


class Lookout:
    """One rank's view of the others.

    Args:
        connections: to each other rank.
        near: the processes of those on this machine.
        on_failure: called once, from whichever thread learns first; must end this rank's blocked operations.

    Attributes:
        failure: of the comm, once there is one.
        began: how many operations of each kind this rank has begun: ``("sent", peer, tag)``, ``("received",
            peer, tag)``, ``("collective", ranks)``.
        thread: that drives the comm, or did last.
    """

    def __init__(
        self,
        team: Team,
        connections: Mapping[int, Connection],
        near: NearProcesses,
        on_failure: Callable[[], None],
    ) -> None:
        self.team = team
        self.failure: FailureRecord | None = None
        self.began: dict[tuple[Any, ...], int] = {}
        self.thread = threading.get_ident()
        self._connections = dict(connections)
        self._ranks = {connection.handle: rank for rank, connection in connections.items()}
        self._near = near
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._heard: list[FailureRecord] = []
        self._decides_at: float | None = None
        self._left: dict[int, dict[tuple[Any, ...], int]] = {}
        self._explained: set[int] = set()

    # What the comm calls.

    def start(self) -> None:
        """From now on failures are heard of."""
        STALLS.add(self)
        WATCH.add(self)

    def stop(self) -> None:
        """What has been said is sent, and the connections are closed."""
        self._wait(lambda: not any(one.has_unsent for one in self._open()), _FLUSH_S)
        for connection in self._open():
            connection.end()
        self._wait(lambda: not self._connections, 0.0 if self.failure is None else _DRAIN_S)
        STALLS.remove(self)
        WATCH.remove(self)
        self._release()

    def publish(self, record: FailureRecord) -> None:
        """Makes `record` the failure that all ranks learn of, unless there is one already."""
        with self._lock:
            self._heard.append(record)
        self._decide()

    def explain(self, peers: tuple[int, ...], where: str) -> FailureRecord | None:
        """Why a connection broke in an operation with `peers`: the failure that all ranks learn of. None
        where nobody has seen one.
        """
        end = time.monotonic() + _CAUSE_S
        while not self._known.wait(0.02) and time.monotonic() < end:
            gone = sorted(set(peers) & set(self._left))
            if gone and self._decides_at is None:
                if not self._known.wait(2 * _SETTLE_S):
                    self.publish(FailureRecord(gone[0], "left", where))
                break
        return self.failure

    def leave(self, *, ending: bool) -> None:
        """Tells the others that this rank leaves in the ordinary way.

        Args:
            ending: the process ends.
        """
        for rank, connection in list(self._connections.items()):
            counts = [[list(key), n] for key, n in self.began.items() if _concerns(key, rank)]
            connection.send({"left": counts, "ending": ending})

    @property
    def leavers(self) -> Collection[int]:
        """The ranks that have closed the comm, or ended."""
        return self._left

    def wait_until_all_left(self, seconds: float) -> None:
        """Returns when every rank has left, one has failed, or `seconds` are over."""
        others = set(range(len(self.team.processes))) - {self.team.rank}
        self._wait(lambda: self.failure is not None or others <= set(self._left), seconds)

    def has_come(self, peer: int, key: tuple[Any, ...]) -> bool:
        """Whether this rank has begun its part of an operation that `peer` waits for."""
        return _has_come(self.began, peer, key)

    def left_without(self, peer: int, key: tuple[Any, ...]) -> bool:
        """Whether `peer` has left and had not begun its part of an operation of this rank."""
        return peer in self._left and not _has_come(self._left[peer], self.team.rank, key)

    def send(self, peer: int, message: dict[str, Any]) -> bool:
        """False: there is no connection."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.send(message)
        return connection is not None

    # What the watch thread calls.

    def handles(self) -> Mapping[int, int]:
        """See `partita.runtime.watch.Watched`."""
        found = dict.fromkeys(self._near.handles, select.POLLIN)
        for connection in self._open():
            found[connection.handle] = select.POLLIN | (select.POLLOUT if connection.has_unsent else 0)
        return found

    @property
    def due_s(self) -> float:
        """See there."""
        return _IDLE_S if self._decides_at is None else self._decides_at - time.monotonic()

    def ready(self, handle: int) -> None:
        """See there."""
        rank = self._ranks.get(handle)
        if rank is None:
            for gone in self._near.gone() & self._connections.keys():
                self._read(gone)  # its last words first
                if gone in self._connections:
                    self._ended(gone, "closed")
        elif rank in self._connections:
            self._read(rank)

    def tick(self, now: float) -> None:
        """See there."""
        if self._decides_at is not None and now >= self._decides_at:
            self._decide()

    def broke(self, error: Exception) -> None:
        """See there."""
        self.publish(FailureRecord.of(self.team.rank, error, "the watch over the other ranks"))

    def forget(self) -> None:
        """See there."""
        self._release()

    def hear(self, record: FailureRecord) -> None:
        """A failure was seen, or somebody tells of one."""
        if self.failure is not None:
            return
        with self._lock:
            self._heard.append(record)
            if self._decides_at is None:
                self._decides_at = time.monotonic() + _SETTLE_S

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
            self._explained.add(rank)
            self.hear(FailureRecord(**message["failed"]))
        elif "left" in message:
            self._left[rank] = {_key(key): n for key, n in message["left"]}
            if message["ending"]:
                STALLS.gone[self.team.processes[rank]] = "left"
        else:
            STALLS.take(self, rank, message)

    def _ended(self, rank: int, how: str) -> None:
        """A connection is over."""
        connection = self._connections.pop(rank)
        connection.close()
        if how == "closed" and rank in self._left:
            return
        process = self.team.processes[rank]
        if how != "closed":
            STALLS.gone[process] = "lost"
        elif rank in self._near.gone() or not (self._heard or rank in self._explained):
            STALLS.gone[process] = "died"  # of a comm that has failed ranks take leave, and may make another
        if rank in self._explained:
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
            record = self.failure = min(self._heard, key=lambda heard: heard.order)
        for connection in self._open():
            connection.send({"failed": asdict(record)})
        self._known.set()
        self._on_failure()

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
        self._near.close()


def _key(key: Any) -> tuple[Any, ...]:
    """As it was before it travelled."""
    return tuple(_key(part) if isinstance(part, list) else part for part in key)


def _concerns(key: tuple[Any, ...], rank: int) -> bool:
    return rank in key[1] if key[0] == "collective" else key[1] == rank


_PARTS = {"recv from": "sent", "send to": "received"}


def _has_come(began: Mapping[tuple[Any, ...], int], waiting: int, key: tuple[Any, ...]) -> bool:
    """Whether who has begun so much has begun its part of what ``waiting`` is in.

    Args:
        key: ``("recv from", peer, tag, number)``, ``("send to", peer, tag, number)``, or ``("collective",
            ranks, number)``.
    """
    if key[0] in _PARTS:
        _, _, tag, number = key
        return began.get((_PARTS[key[0]], waiting, tag), 0) >= number
    _, ranks, number = key
    return began.get(("collective", ranks), 0) >= number
