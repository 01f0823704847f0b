"""Comms whose user is gone: closed when the process makes its next one, whatever other ranks still hold."""

from __future__ import annotations

import gc
from threading import Thread

import torch.distributed as dist
from tests.runtime.worlds import endings

from partita.errors import PeerFailed
from partita.runtime import Comm, ProcessGroupComm
from partita.runtime.comms.left_open import close_after, close_left_open


class _User:
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.comm = ProcessGroupComm.from_group(group).used_by(self)


def _one_rank_keeps_its_own(comm: Comm) -> tuple[list[bool], str]:
    users = [_User()]
    first = users.pop().comm if comm.rank == 0 else users[0].comm
    gc.collect()
    closed = [first.has_failed]  # nothing is closed before ranks meet
    users.append(_User())
    closed.append(first.has_failed)
    users[-1].comm.barrier()
    if comm.rank == 0:
        return closed, ""
    try:
        first.barrier()
    except PeerFailed as error:
        return closed, str(error)
    return closed, "no error"


def test_a_rank_that_still_holds_its_comm_hears_that_another_has_left_it() -> None:
    gone, held = endings(2, _one_rank_keeps_its_own)
    assert gone.error is None, gone.text
    assert held.error is None, held.text
    assert gone.result == ([False, True], "")
    assert held.result[0] == [False, False]
    assert "rank 0 left" in held.result[1]


def _next_one_of_some(comm: Comm) -> bool:
    group = dist.new_group([0, 1])
    user = _User()
    first = user.comm
    del user
    gc.collect()
    if comm.rank < 2:
        _User(group)
    return first.has_failed


def test_a_meeting_of_some_ranks_closes_no_comm_of_more() -> None:
    assert [ending.result for ending in endings(3, _next_one_of_some)] == [False, False, False]


def _closed_before(_: Comm) -> bool:
    user = _User()
    user.comm.close()
    del user
    return _User().comm.has_failed


def test_what_was_closed_by_hand_is_left_alone() -> None:
    assert [ending.result for ending in endings(2, _closed_before)] == [False, False]


class _Nobody:
    pass


class _Meets:
    """While it is closed, another thread makes a comm."""

    processes = (7,)

    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        other = Thread(target=close_left_open, args=(self.processes,))
        other.start()
        other.join()
        self.releases += 1


def test_two_threads_that_make_comms_close_each_once() -> None:
    comms = [_Meets() for _ in range(3)]
    for comm in comms:
        close_after(_Nobody(), comm)
    gc.collect()
    close_left_open((7, 8))
    assert [comm.releases for comm in comms] == [1, 1, 1]
