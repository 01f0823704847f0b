"""Waits that no failure ends leave the caller free; large messages cut off half way are such."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.worlds import endings

from partita.errors import PeerFailed
from partita.runtime import Comm, wait_all
from partita.runtime.comms.waiters import Waiters

LARGE = 32_000_000
"""Elements: more than all the buffers between two processes hold."""


def test_calls_are_made_in_turn_in_another_thread_which_serves_again() -> None:
    waiters, threads = Waiters(), []
    for _ in range(3):
        waiters.wait([lambda: threads.append(threading.get_ident())] * 2)
    assert len(threads) == 6
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    waiters.end()
    assert threads[0] not in {thread.ident for thread in threading.enumerate()}


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, SystemExit])
def test_an_error_of_a_call_is_the_callers_and_ends_the_rest(kind: type[BaseException]) -> None:
    waiters, calls = Waiters(), []

    def fails() -> None:
        raise kind("connection closed by peer")

    with pytest.raises(kind, match="connection closed by peer"):
        waiters.wait([lambda: calls.append(1), fails, lambda: calls.append(2)])
    assert calls == [1]
    waiters.end()


def test_a_release_frees_all_that_wait_and_whoever_comes_later() -> None:
    waiters, never, inside = Waiters(), threading.Event(), threading.Barrier(3)
    errors: list[RuntimeError] = []

    def caller() -> None:
        try:
            waiters.wait([inside.wait, never.wait])
        except RuntimeError as error:
            errors.append(error)

    callers = [threading.Thread(target=caller) for _ in range(2)]
    for each in callers:
        each.start()
    inside.wait(10.0)  # both are in their calls: neither waits for the other
    waiters.release()
    for each in callers:
        each.join(10.0)
    with pytest.raises(RuntimeError, match="has failed"):
        waiters.wait([never.wait])
    assert [str(error) for error in errors] == ["the comm has failed"] * 2
    never.set()
    waiters.end()


def test_what_is_kept_outlives_the_calls() -> None:
    waiters, never = Waiters(), threading.Event()
    gone = threading.Event()

    class Group:
        def __del__(self) -> None:
            gone.set()

    waiters.release()
    waiters.end([never.wait], kept=[Group()])
    assert not gone.is_set()
    never.set()
    assert gone.wait(10.0)


Transfer = Callable[[Comm], Any]


def _send(comm: Comm) -> Any:
    if comm.rank == 0:
        return [comm.send(torch.zeros(LARGE), 1)]
    return [comm.recv(torch.zeros(LARGE), 0)]


def _receive(comm: Comm) -> Any:
    if comm.rank == 0:
        return [comm.recv(torch.zeros(LARGE), 1)]
    return [comm.send(torch.zeros(LARGE), 0)]


def _both(comm: Comm) -> Any:
    other = 1 - comm.rank
    return [comm.send(torch.zeros(LARGE), other), comm.recv(torch.zeros(LARGE), other)]


def _sum(comm: Comm) -> Any:
    return [comm.all_reduce(torch.zeros(LARGE), (0, 1))]


def _object(comm: Comm) -> Any:
    if comm.rank == 0:
        comm.recv_object(1)
    comm.send_object(bytes(LARGE), 0)
    return []


def _cut_off(comm: Comm, transfer: Transfer, how: str) -> None:
    """Rank 1 fails as soon as its part has begun, whatever has crossed by then; all of it, now and then."""
    handles = transfer(comm)
    if comm.rank == 1:
        if how == "exit":
            os._exit(1)
        raise ValueError("the activations are not finite")
    wait_all(handles)
    comm.recv_object(1)


@pytest.mark.parametrize("how", ["raise", "exit"])
@pytest.mark.parametrize("transfer", [_send, _receive, _both, _sum, _object])
def test_a_large_transfer_that_is_cut_off_is_an_error_that_names_the_rank(
    transfer: Transfer, how: str
) -> None:
    left, _ = endings(2, _cut_off, transfer, how)
    assert isinstance(left.error, PeerFailed), left.text
    assert left.error.rank == 1
    assert ("not finite" if how == "raise" else "died without a word") in str(left.error)
