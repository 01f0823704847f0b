"""Traces of what every rank did when: spans on a monotonic clock, converted to one clock when gathered::

tracer = Tracer(rank)
with tracer.span("2F0", "compute", stage=2):
    ...
events = gather(comm, tracer)       # of all ranks, by rank 0's clock
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from partita.errors import ArgumentError
from partita.runtime.comms.comm import Comm

__all__ = [
    "NULL_TRACER",
    "BusyTime",
    "NullTracer",
    "Recorder",
    "TraceEvent",
    "Tracer",
    "align",
    "gather",
    "measure_clock_offsets",
]


@dataclass(frozen=True)
class TraceEvent:
    """One span. Times are seconds of a monotonic clock, of which only differences have a meaning."""

    name: str
    category: str
    rank: int
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.end_s < self.start_s:
            raise ArgumentError(f"{self.name} ends ({self.end_s} s) before it starts ({self.start_s} s)")

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


class Recorder(Protocol):
    """Records spans: a :class:`Tracer`, or :data:`NULL_TRACER`, which costs next to nothing."""

    def span(self, name: str, category: str, **args: Any) -> AbstractContextManager[None]:
        """Record the time that the block takes, also where it raises."""
        ...

    def add(self, name: str, category: str, start_s: float, end_s: float, **args: Any) -> None:
        """Record a span that was timed elsewhere, by ``time.monotonic()``."""
        ...

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        """What has been recorded, in the order in which the spans ended."""
        ...


class Tracer:
    """Records spans of one rank.

    >>> tracer = Tracer(rank=0)
    >>> with tracer.span("0F1", "compute", stage=0):
    ...     pass
    >>> tracer.events[0].name, tracer.events[0].args
    ('0F1', {'stage': 0})
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._records: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def span(self, name: str, category: str, **args: Any) -> AbstractContextManager[None]:
        return _Span(self, name, category, args)

    def add(self, name: str, category: str, start_s: float, end_s: float, **args: Any) -> None:
        self._records.append((name, category, start_s, end_s, args))

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        return tuple(
            TraceEvent(name, category, self._rank, start, end, args)
            for name, category, start, end, args in self._records
        )


class NullTracer:
    """Records nothing."""

    def span(self, name: str, category: str, **args: Any) -> AbstractContextManager[None]:  # noqa: ARG002
        return _NOTHING

    def add(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        return None

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        return ()


class _Span(AbstractContextManager[None]):
    """Times a block and adds it to a recorder."""

    __slots__ = ("_args", "_category", "_name", "_recorder", "_start")

    def __init__(self, recorder: Recorder, name: str, category: str, args: dict[str, Any]) -> None:
        self._recorder = recorder
        self._name = name
        self._category = category
        self._args = args
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.add(self._name, self._category, self._start, time.monotonic(), **self._args)


class BusyTime:
    """Adds up how long passes computed, without what they waited for, and keeps no spans.

    >>> busy = BusyTime()
    >>> busy.add("0F0", "compute", 1.0, 3.0)
    >>> busy.add("wait 0F0", "wait", 1.0, 1.5)
    >>> busy.take()
    (1.5, 2.0)
    """

    def __init__(self) -> None:
        self._passes_s = 0.0
        self._first_s = float("inf")
        self._last_s = float("-inf")

    def span(self, name: str, category: str, **args: Any) -> AbstractContextManager[None]:
        return _Span(self, name, category, args)

    def add(self, name: str, category: str, start_s: float, end_s: float, **args: Any) -> None:  # noqa: ARG002
        if category == "compute":
            self._passes_s += end_s - start_s
        elif category == "wait":
            self._passes_s -= end_s - start_s
        self._first_s = min(self._first_s, start_s)
        self._last_s = max(self._last_s, end_s)

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        return ()

    def take(self) -> tuple[float, float]:
        """Return the seconds of passes, and those from the first span's start to the last one's end, since
        the last call.
        """
        taken = self._passes_s, max(0.0, self._last_s - self._first_s)
        self._passes_s, self._first_s, self._last_s = 0.0, float("inf"), float("-inf")
        return taken


_NOTHING: AbstractContextManager[None] = nullcontext()

NULL_TRACER = NullTracer()
"""The recorder to use where nobody wants a trace."""


def align(events: Sequence[TraceEvent], offsets: Sequence[float]) -> tuple[TraceEvent, ...]:
    """Return the events on rank 0's clock, sorted by start. ``offsets[r]``: by how many seconds the clock of
    rank r is ahead of rank 0's.
    """
    moved = [
        replace(event, start_s=event.start_s - offsets[event.rank], end_s=event.end_s - offsets[event.rank])
        for event in events
    ]
    return tuple(sorted(moved, key=lambda event: (event.start_s, event.rank)))


def measure_clock_offsets(comm: Comm, rounds: int = 8) -> tuple[float, ...]:
    """Return by how many seconds each rank's clock is ahead of rank 0's. Collective; the same on every rank.

    Ranks on one host share a clock: exactly 0. Another host is asked for its time `rounds` times. The answer
    of the shortest round counts, as if given in the middle of that round (Cristian, "Probabilistic clock
    synchronization", 1989), so the error is at most half of its duration.
    """
    hosts = comm.all_gather_object(_host())
    remote = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    if comm.rank == 0:
        offsets = [0.0] * comm.size
        for rank in remote:
            offsets[rank] = _ask(comm, rank, rounds)
    elif comm.rank in remote:
        for _ in range(rounds):
            comm.recv_object(0)
            comm.send_object(time.monotonic(), 0)
    gathered = comm.all_gather_object(offsets if comm.rank == 0 else None)
    return tuple(gathered[0])


def gather(comm: Comm, tracer: Recorder) -> tuple[TraceEvent, ...]:
    """Return all ranks' events on rank 0's clock, sorted by start. Collective; the same on every rank."""
    offsets = measure_clock_offsets(comm)
    return align([event for events in comm.all_gather_object(tracer.events) for event in events], offsets)


def _ask(comm: Comm, rank: int, rounds: int) -> float:
    best_s, offset = float("inf"), 0.0
    for _ in range(rounds):
        asked = time.monotonic()
        comm.send_object(None, rank)
        there = comm.recv_object(rank)
        answered = time.monotonic()
        if answered - asked < best_s:
            best_s, offset = answered - asked, there - (asked + answered) / 2
    return offset


def _host() -> str:
    """Return what identifies this host's clock: its name and, on Linux, the boot that it counts from."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot}"
