"""Who has not come, where it is, and whether it can come at all. Several processes are played here by one:
messages are carried by hand, and time is a number.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from partita.runtime.failures import stalls as module
from partita.runtime.failures import thread_activity
from partita.runtime.failures.failure import FailureRecord
from partita.runtime.failures.failure_detector import Team
from partita.runtime.failures.stalls import Absent, _Stalls

THREAD = threading.main_thread().ident or 0
"""Each process has only this one."""


@dataclass(frozen=True)
class Waits:
    """For other ranks of a comm."""

    comm_name: str
    key: tuple[object, ...]
    needs: Sequence[int]


@dataclass
class Comm:
    """One rank's, or the place where it is being made. Nobody has begun anything unless it says so."""

    team: Team
    post: Callable[[Comm, int, str], None]
    thread: int = THREAD
    leavers: set[int] = field(default_factory=set)
    begun: set[tuple[object, ...]] = field(default_factory=set)
    not_begun_by_leavers: set[tuple[object, ...]] = field(default_factory=set)
    heard: list[FailureRecord] = field(default_factory=list)

    def has_come(self, peer: int, key: tuple[Any, ...]) -> bool:
        return key in self.begun

    def left_without(self, peer: int, key: tuple[Any, ...]) -> bool:
        return peer in self.leavers and key in self.not_begun_by_leavers

    def send(self, peer: int, message: dict[str, Any]) -> bool:
        self.post(self, peer, json.dumps(message))
        return True

    def hear(self, record: FailureRecord) -> None:
        self.heard.append(record)


class Process:
    """What it does, what it waits for, and what has come for it."""

    def __init__(self, now: float) -> None:
        self.stalls = _Stalls()
        self.stalls._last_look = now
        self.waiting: dict[int, Waits] = {}
        self.doing: dict[int, list[str]] = {}
        self.inbox: deque[tuple[Comm, int, str]] = deque()
        self.is_silent = False

    def waits(self, place: str, key: tuple[object, ...], *needs: int, comm: str = "all") -> Waits:
        """From now on, for these ranks."""
        self.doing[THREAD] = [place]
        self.waiting[THREAD] = Waits(comm, key, needs)
        return self.waiting[THREAD]


class World:
    """Four processes, which are the ranks of a comm, and the clock that they share."""

    numbers = (20, 21, 22, 23)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.delay = 0
        """How often somebody looks at the clock, a tenth of a second each, before messages arrive."""
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(module, "WATCH", self)
        monkeypatch.setattr(module, "time", self)
        self.processes = [Process(self.now) for _ in self.numbers]
        self.comms = [Comm(Team("all", rank, self.numbers, 15.0), self._post) for rank in range(4)]
        for process, comm in zip(self.processes, self.comms, strict=True):
            process.stalls.add(comm)

    def monotonic(self) -> float:
        if self.delay:
            self.now, self.delay = self.now + 0.1, self.delay - 1
            if not self.delay:
                self._deliver()
        return self.now

    def wake(self) -> None:
        """Every process looks, and all messages arrive; who is silent does nothing."""
        awake = [process for process in self.processes if not process.is_silent]
        for process in awake:
            with self._as(process):
                process.stalls.look(self.now)
        if not self.delay:
            self._deliver()

    def _deliver(self) -> None:
        awake = [process for process in self.processes if not process.is_silent]
        while any(process.inbox for process in awake):
            for process in awake:
                while process.inbox:
                    comm, sender, message = process.inbox.popleft()
                    with self._as(process):
                        process.stalls.take(comm, sender, json.loads(message))

    def go_on(self, seconds: float) -> None:
        """The watch wakes up twice a second."""
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            self.wake()

    def heard(self) -> list[set[FailureRecord]]:
        """By each rank."""
        return [set(comm.heard) for comm in self.comms]

    def _post(self, comm: Comm, peer: int, message: str) -> None:
        self.processes[peer].inbox.append((self.comms[peer], comm.team.rank, message))

    @contextmanager
    def _as(self, process: Process) -> Iterator[None]:
        with self._monkeypatch.context() as patch:
            patch.setattr(module, "WAITING", process.waiting)
            patch.setattr(thread_activity, "_doing", process.doing)
            yield


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_ranks_that_wait_for_each_other_are_told_who_is_where(world: World) -> None:
    world.processes[1].waits("forward", ("recv from", 0, 7, 1), 0)
    world.go_on(10)  # and that came
    world.processes[1].waits("save_checkpoint()", ("collective", (0, 1, 2, 3), 1), 3)
    world.processes[3].waits("step() number 3", ("recv from", 1, 7, 1), 1)
    world.go_on(10)
    ring = FailureRecord(
        1,
        "deadlock",
        summary="rank 1 is in save_checkpoint() and waits for rank 3; rank 3 is in step() number 3 and waits "
        "for rank 1",
    )
    assert world.heard() == [{ring}] * 4
    assert {tuple(sorted(heard.ring)) for comm in world.comms for heard in comm.heard} == {(21, 23)}


def test_three_ranks_are_a_ring_only_when_the_last_of_them_waits_too(world: World) -> None:
    first, second, third, _ = world.processes
    first.waits("forward", ("recv from", 1, 0, 1), 1)
    second.waits("backward", ("recv from", 2, 0, 1), 2)
    world.go_on(30)
    assert world.heard() == [set()] * 4  # rank 2 is late
    third.waits("close()", ("collective", (0, 1, 2, 3), 1), 0)
    world.go_on(30)
    ring = FailureRecord(
        0,
        "deadlock",
        summary="rank 0 is in forward and waits for rank 1; rank 1 is in backward and waits for rank 2; "
        "rank 2 is in close() and waits for rank 0",
    )
    assert world.heard() == [{ring}] * 4  # the last one too: it uses the same comm


def test_what_was_heard_of_one_wait_is_not_taken_for_the_next(world: World) -> None:
    """Rank 1 waits for rank 0, which begins its part, and then waits for rank 1: that is stopped before it
    hears of it.
    """
    first, second, *_ = world.processes
    first.waits("forward", ("recv from", 2, 0, 1), 2)
    second_wait = second.waits("forward", ("recv from", 0, 0, 1), 0)
    world.go_on(10)
    world.comms[0].begun.add(second_wait.key)
    wait = first.waits("backward", ("recv from", 1, 0, 1), 1)
    where = "forward, where it waits for rank 0"
    assert first.stalls.absent(wait, 0.0) == [Absent(1, where)]
    second.is_silent = True
    world.go_on(10)
    assert world.heard() == [set()] * 4


def test_ranks_that_make_the_same_comm_are_no_ring(world: World) -> None:
    """Each of them has begun its part, though it still waits for the other."""
    for rank, process in enumerate(world.processes[:2]):
        place = Comm(Team("new", rank, (20, 21), 15.0), world._post)
        process.stalls.meet(place)
        wait = process.waits("replicate()", ("meet",), 1 - rank, comm="new")
        world.go_on(10)
        assert place.heard == []
    assert process.stalls.absent(wait, 0.0) == []


def test_a_comm_that_is_being_made_can_be_part_of_a_ring(world: World) -> None:
    first, second, *_ = world.processes
    place = Comm(Team("new", 0, (20, 21), 15.0), world._post)
    first.stalls.meet(place)
    first.waits("replicate()", ("meet",), 1, comm="new")
    second.waits("step() number 3", ("recv from", 0, 7, 1), 0)
    world.go_on(10)
    places = (
        "rank 0 is in replicate() and waits for rank 1; rank 1 is in step() number 3 and waits for rank 0"
    )
    ring = FailureRecord(0, "deadlock", summary=places)
    assert set(place.heard) == {ring}
    assert world.heard() == [{ring}] * 4


def test_who_left_without_its_part_is_told_to_who_waits(world: World) -> None:
    wait = world.processes[0].waits("step() number 3", ("recv from", 1, 7, 2), 1)
    world.comms[0].leavers.add(1)
    world.go_on(10)
    assert world.heard() == [set()] * 4  # its part is on the way
    world.comms[0].not_begun_by_leavers.add(wait.key)
    world.go_on(10)
    assert world.heard()[0] == {FailureRecord(1, "left", "step() number 3")}


def test_where_one_has_left_those_who_wait_for_each_other_are_told_of_it(world: World) -> None:
    """In the ordinary way its last part would have kept them apart."""
    world.processes[0].waits("forward", ("recv from", 1, 7, 1), 1)
    world.processes[1].waits("backward", ("recv from", 0, 8, 1), 0)
    for comm in world.comms:
        comm.leavers.add(2)
    world.go_on(10)
    assert world.heard()[:2] == [{FailureRecord(2, "left", place)} for place in ("forward", "backward")]


def test_who_is_gone_can_not_come_to_a_new_comm_but_numbers_of_another_world_are_others(
    world: World,
) -> None:
    process, *_ = world.processes
    place = Comm(Team("new", 0, (20, 21), 15.0), world._post)
    process.stalls.meet(place)
    process.waits("replicate()", ("meet",), 1, comm="new")
    process.stalls.in_world(1)
    process.stalls.gone[21] = "died"
    process.stalls.in_world(2)
    world.go_on(10)
    assert place.heard == []
    process.stalls.gone[21] = "died"
    process.stalls.in_world(2)
    world.go_on(10)
    assert set(place.heard) == {FailureRecord(1, "died", "replicate()")}


def test_absent_are_those_who_have_not_begun_their_part_and_say_where_they_are(world: World) -> None:
    first, second, third, fourth = world.processes
    wait = first.waits("forward", ("collective", (0, 1, 2, 3), 5), 1, 2, 3)
    world.comms[1].begun.add(wait.key)
    third.waits("step() number 3", ("recv from", 1, 0, 1), 1)
    fourth.is_silent = True
    where = "step() number 3, where it waits for rank 1"
    assert first.stalls.absent(wait, 0.0) == [Absent(2, where), Absent(3, silent_s=0.001)]
    world.go_on(20)
    fourth.is_silent = False
    fourth.doing[THREAD] = ["loading data"]
    world.comms[2].begun.add(wait.key)
    assert first.stalls.absent(wait, 0.0) == [Absent(3, "loading data")]
    assert second.stalls.absent(wait, 0.0) == [Absent(1), Absent(2), Absent(3)]  # it is in no wait


def test_who_has_answered_before_and_is_asked_once_more_is_not_silent(world: World) -> None:
    """Its first answer was taken for all that there is to hear, and its silence since the second question,
    which was on its way, for a sign that it is stopped.
    """
    first, second, *_ = world.processes
    wait = first.waits("forward", ("recv from", 1, 0, 1), 1)
    second.waits("backward", ("recv from", 2, 0, 1), 2)
    here = Absent(1, "backward, where it waits for rank 2")
    assert first.stalls.absent(wait, 0.0) == [here]
    world.go_on(5)
    world.delay = 12
    assert first.stalls.absent(wait, 2.0) == [here]
    second.is_silent = True
    world.delay = 30
    (silent,) = first.stalls.absent(wait, 2.0)
    assert 1.5 < silent.silent_s < 3.0


def test_a_process_that_was_stopped_itself_holds_the_time_against_nobody(world: World) -> None:
    first, second, *_ = world.processes
    wait = first.waits("forward", ("recv from", 1, 0, 1), 1)
    second.is_silent = True
    first.stalls.absent(wait, 0.0)
    world.go_on(20)
    assert first.stalls.absent(wait, 0.0) == [Absent(1, silent_s=20.0)]
    world.now += 1000
    assert first.stalls.absent(wait, 0.0) == [Absent(1, silent_s=0.001)]
    world.go_on(5)
    assert first.stalls.absent(wait, 0.0) == [Absent(1, silent_s=5.0)]


def test_who_does_not_answer_is_known_to_those_who_wait_for_others_behind_it(world: World) -> None:
    first, second, third, _ = world.processes
    wait = first.waits("forward", ("recv from", 1, 0, 1), 1)
    second_wait = second.waits("backward", ("recv from", 2, 0, 1), 2)
    third.is_silent = True
    second.stalls.absent(second_wait, 0.0)
    world.go_on(20)
    assert first.stalls.absent(wait, 0.0) == [Absent(1, "backward, where it waits for rank 2")]
    assert first.stalls.silent_behind(wait) == (22, 20.0)
    third.is_silent = False
    world.wake()
    first.stalls.absent(wait, 0.0)
    assert first.stalls.silent_behind(wait) is None
