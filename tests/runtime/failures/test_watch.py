"""The thread that watches over comms: it reads what comes, keeps appointments, and never goes unheard."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest
from tests.runtime.worlds import endings

from partita.errors import PeerFailed
from partita.runtime import Comm
from partita.runtime.failures.watch import _Watch

LIMIT_S = 10.0


class Recorder:
    """Watches one end of a pipe, and writes down what the thread does with it."""

    def __init__(self) -> None:
        self.end, self.other = os.pipe()
        self.due_s = 3600.0
        self.read: list[bytes] = []
        self.ticks: list[float] = []
        self.errors: list[Exception] = []
        self.threads: set[int] = set()
        self.raises: Exception | None = None

    def handles(self) -> Mapping[int, int]:
        return {self.end: select.POLLIN}

    def ready(self, handle: int) -> None:
        self.threads.add(threading.get_ident())
        self.read.append(os.read(handle, 100))
        if self.raises is not None:
            raise self.raises

    def tick(self, now: float) -> None:
        self.ticks.append(now)

    def broke(self, error: Exception) -> None:
        self.errors.append(error)

    def forget(self) -> None:
        raise AssertionError("this is no child")

    def close(self) -> None:
        os.close(self.end)
        os.close(self.other)


@pytest.fixture
def recorders() -> Iterator[Callable[[], Recorder]]:
    all_recorders: list[Recorder] = []

    def make() -> Recorder:
        all_recorders.append(Recorder())
        return all_recorders[-1]

    yield make
    for one in all_recorders:
        one.close()


def until(is_so: Callable[[], bool]) -> None:
    end, pause = time.monotonic() + LIMIT_S, threading.Event()
    while not is_so():
        assert time.monotonic() < end
        pause.wait(0.002)


def test_one_thread_reads_for_all_and_ends_with_the_last(recorders: Callable[[], Recorder]) -> None:
    watch, first, second = _Watch(), recorders(), recorders()
    watch.add(first)
    watch.add(second)
    os.write(first.other, b"one")
    os.write(second.other, b"two")
    until(lambda: bool(first.read and second.read))
    assert (first.read, second.read) == ([b"one"], [b"two"])
    (thread,) = first.threads | second.threads
    assert thread != threading.get_ident()
    watch.remove(first)
    os.write(first.other, b"late")
    os.write(second.other, b"more")
    until(lambda: len(second.read) == 2)
    assert first.read == [b"one"]
    watch.remove(second)
    assert thread not in {each.ident for each in threading.enumerate()}
    watch.remove(second)  # twice does no harm


def test_it_comes_when_a_tick_is_due_and_when_it_is_woken(recorders: Callable[[], Recorder]) -> None:
    watch, one = _Watch(), recorders()
    one.due_s = 0.0
    watch.add(one)
    until(lambda: len(one.ticks) > 5)
    one.due_s = 3600.0
    before = len(one.ticks)
    watch.wake()
    until(lambda: len(one.ticks) > before)
    watch.remove(one)


def test_a_watch_that_breaks_says_so_to_all_and_starts_anew_for_the_next(
    recorders: Callable[[], Recorder],
) -> None:
    watch, faulty, other, later = _Watch(), recorders(), recorders(), recorders()
    watch.add(faulty)
    watch.add(other)
    faulty.raises = ValueError("out of step")
    os.write(faulty.other, b"x")
    until(lambda: bool(faulty.errors and other.errors))
    assert faulty.errors == other.errors == [faulty.raises]
    watch.remove(faulty)
    watch.add(later)
    os.write(later.other, b"new")
    until(lambda: later.read == [b"new"])
    watch.remove(later)


def _breaks(comm: Comm) -> None:
    """Rank 1 gets a message that makes no sense."""
    if comm.rank == 0:
        comm._detector.send(1, {"answer": 0, "facts": [["nonsense"]]})  # type: ignore[attr-defined]
        comm.recv_object(1)
    else:
        comm.recv_object(0)


def test_a_rank_whose_watch_breaks_is_named_on_all_ranks() -> None:
    for ending in endings(2, _breaks):
        assert isinstance(ending.error, PeerFailed), ending.text
        assert ending.error.rank == 1
        assert "rank 1 failed in the watch over the other ranks: ValueError" in str(ending.error)
