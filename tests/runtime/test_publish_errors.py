"""Errors that other ranks have to hear of."""

from __future__ import annotations

import pytest
import torch

from partita.errors import ExecutionError, PeerFailed, ScheduleError
from partita.runtime import Comm, InProcessWorld
from partita.runtime.publish_errors import closed_on_error, publish_errors


def test_an_error_is_raised_here_and_told_to_those_who_wait() -> None:
    heard: list[str] = []

    def body(comm: Comm) -> None:
        if comm.rank == 0:
            with publish_errors(comm, "reading data"):
                raise StopIteration("no more")  # a generator that lets this one pass raises another
        with pytest.raises(PeerFailed) as caught:
            comm.recv(torch.empty(1), 0).wait()
        heard.append(str(caught.value))

    with pytest.raises(StopIteration, match="no more"):
        InProcessWorld(2).run(body)
    assert len(heard) == 1
    assert "reading data" in heard[0]
    assert "StopIteration: no more" in heard[0]


def test_nothing_is_told_where_nothing_is_raised() -> None:
    def body(comm: Comm) -> list[int]:
        with publish_errors(comm, "counting"), closed_on_error(comm, "counting"):
            ranks: list[int] = comm.all_gather_object(comm.rank)
        comm.barrier()
        return ranks

    assert InProcessWorld(2).run(body) == [[0, 1]] * 2


def _three_stages(comm: Comm) -> None:
    comm.barrier()
    raise ScheduleError("three stages for two ranks")


def _full_on_rank_0(comm: Comm) -> None:
    if comm.rank == 0:
        raise OSError("disk full")
    comm.barrier()


def test_what_all_ranks_raise_is_not_told_and_the_comm_is_closed() -> None:
    def body(comm: Comm) -> None:
        with pytest.raises(ScheduleError), closed_on_error(comm, "a schedule", (ScheduleError,)):
            _three_stages(comm)
        with pytest.raises(ExecutionError, match="has closed"):
            comm.barrier()

    InProcessWorld(2).run(body)


def test_what_one_rank_raises_is_told_before_the_comm_is_closed() -> None:
    ended: list[int] = []

    def body(comm: Comm) -> None:
        raised = OSError if comm.rank == 0 else PeerFailed
        with pytest.raises(raised, match="disk full"), closed_on_error(comm, "replicate()"):
            _full_on_rank_0(comm)
        with pytest.raises(ExecutionError):
            comm.barrier()
        ended.append(comm.rank)

    with pytest.raises(OSError, match="disk full"):
        InProcessWorld(2).run(body)
    assert sorted(ended) == [0, 1]
