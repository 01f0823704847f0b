"""What only the comm over processes does: several comms on one group, the user's own groups, time limits."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.worlds import endings
from torch.testing._internal.distributed.fake_pg import FakeStore

from partita.errors import ArgumentError, ExecutionError, PeerFailed
from partita.runtime import Comm, ProcessGroupComm
from partita.runtime.comms import own_groups


def _several_comms(comm: Comm) -> Any:
    with ProcessGroupComm.from_group() as second:
        mine, theirs = torch.zeros(1), torch.zeros(1)
        other = 1 - comm.rank
        handles = [second.recv(theirs, other), comm.recv(mine, other)]
        handles += [comm.send(torch.tensor([1.0]), other), second.send(torch.tensor([2.0]), other)]
        for handle in handles:
            handle.wait()
    total = torch.tensor([float(comm.rank)])
    dist.all_reduce(total)
    return mine.item(), theirs.item(), total.item()


def test_comms_on_one_group_do_not_mix_and_leave_the_users_group_alone() -> None:
    assert [ending.result for ending in endings(2, _several_comms)] == [(1.0, 2.0, 1.0)] * 2


def _subgroup(comm: Comm) -> Any:
    group = dist.new_group([0, 2])
    if comm.rank == 1:
        try:
            ProcessGroupComm.from_group(group)
        except ValueError as error:
            return str(error)
    with ProcessGroupComm.from_group(group) as pair:
        return pair.rank, pair.size, pair.all_gather_object(comm.rank)


def test_a_comm_over_a_subgroup_counts_its_own_ranks() -> None:
    first, outsider, second = [ending.result for ending in endings(3, _subgroup)]
    assert (first, second) == ((0, 2, [0, 2]), (1, 2, [0, 2]))
    assert outsider == "this process is not a member of the group: make the comm on its members only"


def _never_answers(comm: Comm) -> None:
    with ProcessGroupComm.from_group(timeout_s=0.5) as second:
        if comm.rank == 0:
            second.recv(torch.zeros(1), 1, tag=9).wait()
        comm.recv(torch.zeros(1), 0).wait()


def test_a_living_peer_that_does_not_answer_is_an_error_after_the_time_limit() -> None:
    waiting, silent = endings(2, _never_answers)
    assert isinstance(waiting.error, ExecutionError)
    assert not isinstance(waiting.error, PeerFailed)
    assert "rank 0 waited 0.5 s in recv from rank 1 (tag 9), and rank 1, though alive" in str(waiting.error)
    assert isinstance(silent.error, PeerFailed)
    assert silent.error.rank == 0


def _many_objects(comm: Comm) -> Any:
    if comm.rank == 0:
        for number in range(1100):
            comm.send_object(number, 1)
        return None
    return [comm.recv_object(0) for _ in range(1100)] == list(range(1100))


def test_more_objects_than_are_held_back_wait_for_the_receiver_and_none_is_lost_at_close() -> None:
    assert [ending.result for ending in endings(2, _many_objects)] == [None, True]


def test_without_a_default_group_the_next_step_is_named() -> None:
    with pytest.raises(ValueError, match=r"torch.distributed.init_process_group\(\)"):
        ProcessGroupComm.from_group()


def test_a_group_that_sends_nothing_is_refused() -> None:
    """It was "'NoneType' object has no attribute '_timeout'"."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ArgumentError, match=r"'fake', which sends nothing.*InProcessWorld\(ranks\).run"):
            ProcessGroupComm.from_group()
    finally:
        dist.destroy_process_group()


def _dies_while_connecting(comm: Comm) -> None:
    """Rank 1 ends when the sum over it and rank 0 is to be connected; the system's text reaches rank 0."""
    if comm.rank == 2:
        comm.recv(torch.zeros(1), 0).wait()

    def end(*_args: Any) -> Any:
        if comm.rank == 1:
            os._exit(1)
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:1] Connection reset by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_groups, "gloo_group", end)
        comm.all_reduce(torch.zeros(1), (0, 1)).wait()


def test_a_rank_that_dies_while_some_ranks_connect_is_named() -> None:
    first, _, third = endings(3, _dies_while_connecting)
    for ending in (first, third):
        assert isinstance(ending.error, PeerFailed), ending.text
        assert ending.error.rank == 1
