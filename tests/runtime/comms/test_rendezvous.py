"""The ranks of a new comm find each other through a store; where one can't come, the others are told."""

from __future__ import annotations

import select
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch.distributed as dist

from partita._torch.distributed.groups import Store
from partita.errors import DeadlockError, ExecutionError, PeerFailed, SignatureMismatch
from partita.runtime.comms import rendezvous
from partita.runtime.comms.rendezvous import meet_all
from partita.runtime.failures import interruptible as waiting
from partita.runtime.failures.connections import Address, Listener
from partita.runtime.failures.failure import FailureRecord, Kind
from partita.runtime.failures.failure_detector import Team
from partita.runtime.failures.processes import own_machine
from partita.runtime.failures.stalls import STALLS
from partita.runtime.failures.thread_activity import WAITING, doing

LIMIT_S = 60.0
PROCESSES = (9000, 9001, 9002)


@pytest.fixture(autouse=True)
def _leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No wait, no meeting, and no helper thread, however it ends."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    waits, meetings, threads = dict(WAITING), dict(STALLS._meetings), set(threading.enumerate())
    yield
    assert waits == WAITING
    assert meetings == STALLS._meetings
    for thread in set(threading.enumerate()) - threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def _store() -> Store:
    return cast(Store, dist.HashStore())


def _team(rank: int, size: int = 3) -> Team:
    return Team("a comm of the test", rank, PROCESSES[:size], 15.0)


class Asked:
    """A store that does something whenever it is asked for that key."""

    def __init__(self, key: str, action: Callable[[], None]) -> None:
        self._store, self._key, self._action = _store(), key, action
        self.set, self.get = self._store.set, self._store.get

    def check(self, keys: list[str]) -> bool:
        if keys == [self._key]:
            self._action()
        return self._store.check(keys)


class Clock:
    """Stands still until it is told to run."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def run(self) -> None:
        self.now += LIMIT_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of the limit."""
    fake = Clock()
    monkeypatch.setattr(waiting, "time", fake)
    return fake


def test_each_two_ranks_get_a_connection() -> None:
    store = _store()
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda rank: meet_all(store, _team(rank), LIMIT_S), range(3)))
    for rank, (connections, local) in enumerate(results):
        assert connections.keys() == {0, 1, 2} - {rank}
        assert local.gone() == frozenset()
        for peer, connection in connections.items():
            connection.send({"from": rank, "to": peer})
    for rank, (connections, local) in enumerate(results):
        for peer, connection in connections.items():
            assert select.select([connection.handle], [], [], LIMIT_S)[0]
            assert connection.receive() == ([{"from": peer, "to": rank}], None)
        local.close()
    for connections, _ in results:
        for connection in connections.values():
            connection.close()


def test_a_rank_alone_needs_no_store() -> None:
    class Unused:
        """None of its methods is there."""

    connections, local = meet_all(cast(Store, Unused()), _team(0, size=1), LIMIT_S)
    assert connections == {}
    assert local.handles == ()


def test_who_does_not_come_in_time_is_named(clock: Clock) -> None:
    store, listener = Asked("watch/2", clock.run), Listener(3)
    store.set("watch/1", listener.address.to_json())
    with pytest.raises(ExecutionError, match=r"rank 0 has waited 60 s for ranks \[2\], which did not come"):
        meet_all(cast(Store, store), _team(0), LIMIT_S)
    listener.close()


def test_the_log_says_early_for_whom_a_rank_waits_and_where(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_QUIET_S", -1.0)
    store, listener = Asked("watch/2", clock.run), Listener(3)
    store.set("watch/1", listener.address.to_json())
    with doing("saving"), pytest.raises(ExecutionError, match=r"\(saving\): .* give the group"):
        meet_all(cast(Store, store), _team(0), LIMIT_S)
    assert "for ranks [2], which did not come (saving): let every rank" in caplog.text
    assert len(caplog.records) == 1
    listener.close()


def test_ranks_that_meet_in_different_calls_hear_of_both() -> None:
    """One took what the other had sent for its own: "cannot unpack non-iterable NoneType object"."""
    store, purposes = _store(), ("saving", "saving", "making a schedule")

    def error_of(rank: int) -> str:
        with doing(purposes[rank]), pytest.raises(SignatureMismatch) as caught:
            meet_all(store, _team(rank), LIMIT_S)
        return str(caught.value)

    with ThreadPoolExecutor(3) as threads:
        first, second, third = threads.map(error_of, range(3))
    assert first.startswith("rank 0 is in saving and rank 2 in making a schedule, where they meet each other")
    assert second.startswith("rank 1 is in saving and rank 2 in making a schedule")
    assert third.startswith("rank 2 is in making a schedule and rank ")


def test_where_nobody_comes_in_time_the_store_may_be_the_reason(clock: Clock) -> None:
    store = Asked("watch/0", clock.run)
    with pytest.raises(ExecutionError, match=r"took longer than 60 s: is the process that hosts the store"):
        meet_all(cast(Store, store), _team(1), LIMIT_S)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("died", "rank 1 died without a word"), ("left", "rank 1 left while .* waited for it in making a comm")],
)
def test_a_process_that_is_known_to_be_gone_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, text: str
) -> None:
    monkeypatch.setitem(STALLS.gone, PROCESSES[1], kind)
    with pytest.raises(PeerFailed, match=text) as caught:
        meet_all(_store(), _team(0), LIMIT_S)
    assert caught.value.rank == 1


def test_ranks_that_wait_for_each_other_are_not_waited_for() -> None:
    record = FailureRecord(0, "deadlock", summary="rank 0 waits for rank 1, and rank 1 for rank 0")
    store = Asked("watch/1", lambda: STALLS._meetings["a comm of the test"].hear(record))
    with pytest.raises(DeadlockError, match="rank 1 for rank 0"):
        meet_all(cast(Store, store), _team(0), LIMIT_S)


@pytest.mark.skipif(not own_machine(), reason="only Linux lets processes be watched")
def test_a_process_that_has_come_and_ended_is_not_waited_for() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    store, listener = _store(), Listener(2)
    here = listener.address
    store.set("watch/1", Address(here.host, here.port, here.token, here.machine, process.pid).to_json())
    with pytest.raises(PeerFailed, match="rank 1 died without a word"):
        meet_all(store, _team(0, size=2), LIMIT_S)
    listener.close()
