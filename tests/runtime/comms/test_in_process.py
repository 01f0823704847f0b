from __future__ import annotations

from typing import Any

import pytest
import torch

from partita.errors import DeadlockError, ExecutionError, PeerFailed, SignatureMismatch
from partita.runtime import Comm, InProcessComm, InProcessWorld


def test_ranks_run_one_at_a_time_in_an_order_that_never_changes() -> None:
    def fn(comm: Comm, seen: list[str]) -> float:
        seen.append(f"{comm.rank} starts")
        if comm.rank > 0:
            comm.recv(torch.zeros(1), comm.rank - 1).wait()
        seen.append(f"{comm.rank} goes on")
        if comm.rank < comm.size - 1:
            comm.send(torch.ones(1), comm.rank + 1).wait()
        return torch.rand(()).item()

    runs = []
    for _ in range(3):
        seen: list[str] = []
        torch.manual_seed(0)
        runs.append((InProcessWorld(3).run(fn, seen), seen))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][1] == ["0 starts", "0 goes on", "1 starts", "1 goes on", "2 starts", "2 goes on"]


def test_a_deadlock_is_an_error_that_lists_who_waits_for_what() -> None:
    def fn(comm: Comm) -> None:
        comm.recv(torch.zeros(2, 3), (comm.rank + 1) % 2, tag=4).wait()

    with pytest.raises(DeadlockError) as caught:
        InProcessWorld(2).run(fn)
    assert str(caught.value) == (
        "every rank waits for another:\n"
        "  rank 0 waits: to receive float32[2, 3] from rank 1 (tag 4)\n"
        "  rank 1 waits: to receive float32[2, 3] from rank 0 (tag 4)"
    )


def test_a_send_waits_for_its_receive_as_on_gloo_so_crossed_sends_are_a_deadlock() -> None:
    def fn(comm: Comm) -> None:
        comm.send(torch.zeros(1), 1 - comm.rank).wait()
        comm.recv(torch.zeros(1), 1 - comm.rank).wait()

    with pytest.raises(DeadlockError, match=r"rank 0 waits: for rank 1 to receive float32\[1\] \(tag 0\)"):
        InProcessWorld(2).run(fn)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (torch.zeros(2, 3), r"rank 0 sent float32\[2, 3\], but rank 1 expects float32\[3, 2\] \(tag 0\)"),
        (torch.zeros(3, 2).int(), r"rank 0 sent int32\[3, 2\], but rank 1 expects float32\[3, 2\] \(tag 0\)"),
    ],
)
def test_a_message_that_does_not_fit_the_buffer_names_both_sides(sent: torch.Tensor, text: str) -> None:
    def fn(comm: Comm) -> None:
        if comm.rank == 0:
            comm.send(sent, 1).wait()
        else:
            comm.recv(torch.zeros(3, 2), 0).wait()

    with pytest.raises(SignatureMismatch, match=text):
        InProcessWorld(2).run(fn)


def test_an_all_reduce_of_different_shapes_is_refused() -> None:
    def fn(comm: Comm) -> None:
        comm.all_reduce(torch.zeros(comm.rank + 1), (0, 1)).wait()

    with pytest.raises(SignatureMismatch, match=r"rank 0 brings float32\[1\], but rank 1 float32\[2\]"):
        InProcessWorld(2).run(fn)


def test_run_raises_the_original_and_the_others_get_peer_failed() -> None:
    seen: list[Any] = []

    def fn(comm: Comm) -> None:
        if comm.rank == 1:
            raise ValueError("the loss is not finite")
        try:
            comm.recv(torch.zeros(1), 2 - comm.rank).wait()
        except PeerFailed as error:
            seen.append((comm.rank, error.rank, "the loss is not finite" in error.traceback_text))
            raise

    with pytest.raises(ValueError, match="the loss is not finite"):
        InProcessWorld(3).run(fn)
    assert seen == [(0, 1, True), (2, 1, True)]


def test_waiting_for_a_rank_that_has_ended_says_that_it_left() -> None:
    def fn(comm: Comm) -> None:
        if comm.rank == 0:
            comm.recv(torch.zeros(1), 1).wait()

    with pytest.raises(PeerFailed, match="rank 1 left while another rank still waited for it"):
        InProcessWorld(2).run(fn)


def test_a_world_can_run_again_after_a_failure() -> None:
    def fails(comm: Comm) -> None:
        comm.send_object("left over", 1 - comm.rank)
        raise ValueError("once")

    world = InProcessWorld(2)
    with pytest.raises(ValueError, match="once"):
        world.run(fails)
    assert world.run(lambda comm: comm.all_gather_object(comm.rank)) == [[0, 1], [0, 1]]


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank, not 0"):
        InProcessWorld(0)


def test_each_rank_starts_with_the_grad_mode_of_the_caller() -> None:
    with torch.no_grad():
        assert InProcessWorld(2).run(lambda comm: torch.is_grad_enabled()) == [False, False]
    assert InProcessWorld(1).run(lambda comm: torch.is_grad_enabled()) == [True]


def test_ranks_use_as_many_threads_as_the_caller() -> None:
    before = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            assert InProcessWorld(2).run(lambda _comm: torch.get_num_threads()) == [number, number]
    finally:
        torch.set_num_threads(before)


def test_a_comm_that_is_used_when_its_rank_has_ended_is_an_error_and_no_hang() -> None:
    first, second = InProcessWorld(2).run(lambda comm: comm)
    assert (first.is_over, second.is_over) == (True, True)
    with pytest.raises(ExecutionError, match=r"rank 1 of an InProcessWorld has ended, and its comm is used"):
        second.barrier()


def test_a_tensor_that_ranks_share_has_a_copy_on_each_rank_but_the_first() -> None:
    shared, other = torch.nn.Parameter(torch.ones(2)), torch.arange(2)

    def own(comm: Comm) -> list[torch.Tensor]:
        assert isinstance(comm, InProcessComm)
        mine = [comm.own(shared), comm.own(other)]
        assert comm.own(shared) is mine[0]
        return mine

    first, second = InProcessWorld(2).run(own)
    assert first[0] is shared
    assert first[1] is other
    assert isinstance(second[0], torch.nn.Parameter)
    assert second[0].requires_grad
    assert second[0].data_ptr() != shared.data_ptr()
    assert torch.equal(second[1], other)
