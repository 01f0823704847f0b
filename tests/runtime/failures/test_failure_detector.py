"""What one rank sees of the others: a failure reaches all, and all take the same one; who has died is named,
and who took leave is not. The tests do what the watch thread does.
"""

from __future__ import annotations

import math
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from partita.runtime.failures import failure_detector as module
from partita.runtime.failures.connections import Connection
from partita.runtime.failures.failure import FailureRecord
from partita.runtime.failures.failure_detector import FailureDetector, Team
from partita.runtime.failures.stalls import _Stalls

LIMIT_S = 60.0
PROCESSES = (10, 11, 12)
RAISED = FailureRecord(1, "raised", "step() number 3", "ValueError: not finite", "its traceback")
NEAR = -1
"""The descriptor that tells of a process of this machine."""


class Local:
    """The processes on this machine."""

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self.handles: tuple[int, ...] = ()

    def gone(self) -> frozenset[int]:
        return frozenset(self.ended)

    def close(self) -> None:
        pass


class World:
    """Three ranks, each connected to each other one."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        connections: list[dict[int, Connection]] = [{} for _ in PROCESSES]
        for one in range(3):
            for other in range(one):
                here, there = _pair()
                connections[one][other] = Connection(here, 15.0)
                connections[other][one] = Connection(there, 15.0)
        self.local = [Local() for _ in PROCESSES]
        self.ranks = [
            FailureDetector(
                Team("comm", rank, PROCESSES, 15.0), connections[rank], self.local[rank], self._end(rank)
            )  # type: ignore[arg-type]
            for rank in range(3)
        ]

    def _end(self, rank: int) -> Callable[[], None]:
        return lambda: self.ends.append(rank)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Reads what comes."""
        while not is_so():
            poll, owners = select.poll(), {}
            for one in self.ranks:
                for handle, events in one.handles().items():
                    poll.register(handle, events)
                    owners[handle] = one
            ready = poll.poll(1000 * LIMIT_S)
            assert ready
            for handle, _ in ready:
                owners[handle].ready(handle)

    def until_heard(self, count: int, *ranks: int) -> None:
        """So many failures by each of these ranks."""
        self.until(lambda: all(len(self.ranks[rank]._heard) >= count for rank in ranks))

    def tick(self, now: float = math.inf) -> list[FailureRecord | None]:
        """What has failed, as each rank has it."""
        for one in self.ranks:
            one.tick(now)
        return [one.failure for one in self.ranks]


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    return one, other


@pytest.fixture
def stalls(monkeypatch: pytest.MonkeyPatch) -> _Stalls:
    """Those of a process of its own."""
    fresh = _Stalls()
    monkeypatch.setattr(module, "STALLS", fresh)
    return fresh


@pytest.fixture
def world(stalls: _Stalls) -> Iterator[World]:
    ranks = World()
    yield ranks
    for one in ranks.ranks:
        one.forget()


def test_who_leaves_because_of_a_deadlock_is_not_its_cause(world: World) -> None:
    """`save_checkpoint` on rank 0 alone: it raised at once and ended, and the others, which take a tenth of a
    second to decide, blamed it for having left.
    """
    ring = FailureRecord(0, "deadlock", summary="rank 0 waits for rank 1; rank 1 for rank 0", ring=(10, 11))
    for one in world.ranks[1:]:
        one.hear(ring)
        one.hear(FailureRecord(0, "left", "step() number 3"))
    assert world.tick()[1:] == [ring, ring]


def test_who_had_left_is_the_cause_of_a_deadlock_of_others(world: World) -> None:
    left = FailureRecord(2, "left", "step() number 3")
    world.ranks[0].hear(FailureRecord(0, "deadlock", summary="ranks 0 and 1", ring=(10, 11)))
    world.ranks[0].hear(left)
    assert world.tick()[0] == left


def test_a_failure_reaches_all_and_ends_the_operations_of_each_rank_once(world: World) -> None:
    world.ranks[1].publish(RAISED)
    assert world.ends == [1]
    assert world.ranks[0].due_s > 60
    world.until_heard(1, 0, 2)
    assert world.ranks[0].due_s <= module._DECIDE_S
    assert world.tick(now=0.0) == [None, RAISED, None]  # another failure may count more
    assert world.tick() == [RAISED] * 3
    assert world.ranks[0].due_s > 60
    assert world.ends == [1, 0, 2]
    world.ranks[0].publish(FailureRecord(0, "raised"))
    world.ranks[2].hear(FailureRecord(0, "raised"))
    assert world.tick() == [RAISED] * 3
    assert world.ends == [1, 0, 2]


def test_of_several_failures_at_about_the_same_time_all_take_the_same(world: World) -> None:
    """Rank 2 dies because rank 1 has raised, but is seen first."""
    world.ranks[2].forget()
    world.until_heard(1, 0, 1)
    world.ranks[1].publish(RAISED)
    world.until_heard(2, 0)
    assert world.tick()[:2] == [RAISED] * 2


def test_who_ends_without_a_word_has_died_and_those_who_see_it_tell_it(world: World, stalls: _Stalls) -> None:
    world.ranks[2].forget()
    world.ranks[1]._connections[2].close()  # rank 1 does not see it
    del world.ranks[1]._connections[2]
    world.until_heard(1, 0)
    world.ranks[0].tick(math.inf)
    world.until_heard(1, 1)
    assert world.tick()[:2] == [FailureRecord(2, "died")] * 2
    assert stalls.gone == {12: "died"}


def test_whose_host_does_not_answer_is_lost(
    world: World, stalls: _Stalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = world.ranks[0]._connections[2]
    monkeypatch.setattr(silent, "receive", lambda: ([], "lost"))
    world.ranks[0].ready(silent.handle)
    lost = FailureRecord(2, "lost", summary="its host has not answered for 15 s")
    assert world.tick()[0] == lost
    assert stalls.gone == {12: "lost"}


@pytest.mark.parametrize("last_words", [None, RAISED], ids=["silent", "raised"])
def test_a_process_that_is_gone_has_died_though_a_child_holds_its_connections(
    world: World, stalls: _Stalls, last_words: FailureRecord | None
) -> None:
    first, second, _ = world.ranks
    world.local[0].handles = (NEAR,)
    assert first.handles()[NEAR] == select.POLLIN
    if last_words is not None:
        second.publish(last_words)
        assert select.select([first._connections[1].handle], [], [], LIMIT_S)[0]
    world.local[0].ended.add(1)
    first.ready(NEAR)
    assert world.tick()[0] == (last_words or FailureRecord(1, "died"))
    assert stalls.gone == {11: "died"}


@pytest.mark.parametrize(("ending", "gone"), [(False, {}), (True, {11: "left", 12: "left"})])
def test_who_took_leave_has_not_failed(
    world: World, stalls: _Stalls, monkeypatch: pytest.MonkeyPatch, ending: bool, gone: dict[int, str]
) -> None:
    first, *others = world.ranks
    for one in others:
        one.leave(ending=ending)
    monkeypatch.setattr(first, "_wait", lambda is_done, seconds: world.until(is_done))
    first.wait_until_all_left(LIMIT_S)
    assert set(first.leavers) == {1, 2}
    for one in others:
        one.stop()
    world.until(lambda: not first._connections)
    assert first._heard == []
    assert stalls.gone == gone


def test_who_closes_its_end_because_this_rank_has_left_is_not_dead(world: World, stalls: _Stalls) -> None:
    """A comm that nobody used any more was closed, and the watch thread saw the others close theirs before it
    was stopped: its rank called them dead, and made no comm with them ever after.
    """
    leaver = world.ranks[0]
    leaver.leave(ending=False)
    for connection in leaver._open():
        connection.end()
    world.until(lambda: not leaver._connections)
    assert world.tick() == [None, None, None]
    assert stalls.gone == {}
    assert set(leaver.leavers) == {1, 2}


def test_what_was_said_arrives_and_who_has_said_it_is_not_called_dead_as_well(
    world: World, stalls: _Stalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its record counts less than a death. Ranks of a comm that has failed may make another, so they
    are not gone.
    """
    stuck = FailureRecord(0, "deadlock", summary="x" * 2_000_000)  # more than the kernel takes at once
    last = world.ranks[2]
    last.publish(stuck)
    assert last._connections[0].has_unsent
    monkeypatch.setattr(last, "_wait", lambda is_done, seconds: world.until(is_done))
    last.stop()
    world.until(lambda: 2 not in {*world.ranks[0]._connections, *world.ranks[1]._connections})
    assert world.tick() == [stuck] * 3
    assert stalls.gone == {}


def test_who_left_is_missed_only_where_it_had_not_begun_its_part(world: World) -> None:
    everyone = (0, 1, 2)
    last = world.ranks[2]
    last.began |= {("sent", 0, 7): 2, ("received", 0, 7): 1, ("collective", everyone): 3, ("sent", 1, 8): 9}
    begun = [("recv from", 2, 7, 2), ("send to", 2, 7, 1), ("collective", everyone, 3, "sum")]
    not_begun = [
        ("recv from", 2, 7, 3),
        ("recv from", 2, 8, 1),
        ("send to", 2, 7, 2),
        ("collective", everyone, 4, "sum"),
        ("collective", (0, 2), 1, "sum"),
    ]
    for key in begun:
        assert last.has_come(0, key)
    for key in not_begun:
        assert not last.has_come(0, key)
        assert not world.ranks[0].left_without(2, key)
    last.leave(ending=False)
    world.until(lambda: 2 in world.ranks[0].leavers)
    for key in begun:
        assert not world.ranks[0].left_without(2, key)
    for key in not_begun:
        assert world.ranks[0].left_without(2, key)


def test_why_a_connection_broke_is_what_all_ranks_learn_of(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It broke before a word had come."""
    monkeypatch.setattr(module, "_CAUSE_S", math.inf)
    heard: list[FailureRecord | None] = []
    asks = threading.Thread(
        target=lambda: heard.append(world.ranks[0].explain((2,), "recv from rank 2")), daemon=True
    )
    asks.start()
    world.ranks[1].publish(RAISED)
    world.until_heard(1, 0)
    world.tick()
    asks.join(LIMIT_S)
    assert heard == [RAISED]


def test_a_connection_that_broke_because_its_peer_left_is_told_to_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DECIDE_S", 0.0)
    world.ranks[2].leave(ending=False)
    world.until(lambda: 2 in world.ranks[0].leavers)
    left = FailureRecord(2, "left", "recv from rank 2")
    assert world.ranks[0].explain((1, 2), "recv from rank 2") == left
    world.until_heard(1, 1)
    assert world.tick()[:2] == [left] * 2


def test_a_connection_that_broke_for_no_reason_that_anybody_saw_has_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CAUSE_S", 0.1)
    world.ranks[2].leave(ending=False)
    world.until(lambda: 2 in world.ranks[0].leavers)
    assert world.ranks[0].explain((1,), "recv from rank 1") is None
    assert world.tick() == [None] * 3


def test_a_rank_whose_collective_of_that_number_is_another_one_has_not_come(world: World) -> None:
    """All ranks of three had begun their fourth collective, of two kinds, and no deadlock was seen."""
    everyone = (0, 1, 2)
    last = world.ranks[2]
    for number, what in enumerate(("sum", "broadcast from rank 0"), start=1):
        last.began["collective", everyone] = number
        last.note_collective(("collective", everyone, number, what))
    assert last.has_come(0, ("collective", everyone, 1, "sum"))
    assert last.has_come(0, ("collective", everyone, 2, "broadcast from rank 0"))
    assert not last.has_come(0, ("collective", everyone, 2, "sum"))
