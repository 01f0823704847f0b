"""Two "ranks" in two threads: a raw gloo group does not mind."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from partita._torch.distributed.groups import (
    RawGroup,
    abort_gloo,
    all_reduce_sum,
    gloo_group,
    group_store,
    group_timeout,
    is_of_parent,
    nccl_group,
    prefixed,
    world_number,
)

LIMIT = timedelta(seconds=20)


@pytest.fixture(params=["", "lo"], ids=["default interface", "GLOO_SOCKET_IFNAME"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RawGroup]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", request.param)
    store = dist.HashStore()
    groups: dict[int, RawGroup] = {}

    def make(rank: int) -> None:
        groups[rank] = gloo_group(prefixed(store, "pair"), rank, 2, 20.0)  # type: ignore[arg-type]

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    yield [groups[0], groups[1]]
    for group in groups.values():
        abort_gloo(group)


def test_a_group_passes_messages_and_sums(pair: list[RawGroup]) -> None:
    received, mine, theirs = torch.zeros(3), torch.ones(2), torch.ones(2)
    works = [pair[0].send([torch.arange(3.0)], 1, 7), pair[1].recv([received], 0, 7)]
    works += [all_reduce_sum(pair[0], mine), all_reduce_sum(pair[1], theirs)]
    for work in works:
        work.wait(LIMIT)
    assert received.tolist() == [0.0, 1.0, 2.0]
    assert mine.tolist() == theirs.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("aborting", [0, 1], ids=["its own side", "the peer's side"])
def test_abort_wakes_a_blocked_receive_on_both_sides(pair: list[RawGroup], aborting: int) -> None:
    raised: list[str] = []
    work = pair[0].recv([torch.zeros(3)], 1, 7)

    def block() -> None:
        try:
            work.wait(timedelta(seconds=60))
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=block)
    thread.start()
    abort_gloo(pair[aborting])
    thread.join(20.0)
    assert not thread.is_alive()
    assert len(raised) == 1


def test_a_groups_timeout_is_the_one_that_it_was_made_with() -> None:
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        assert group_timeout(None) == limit
    finally:
        dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"init_process_group\(\)"):
        group_timeout(None)


def test_a_missing_default_group_says_what_to_call() -> None:
    with pytest.raises(ValueError, match=r"call torch.distributed.init_process_group\(\) first"):
        group_store(None)


def test_a_store_whose_host_is_gone_is_an_error_at_once() -> None:
    """A new connection to it was tried for as long as the group's timeout, half an hour by default."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    dist.init_process_group("gloo", store=client, rank=0, world_size=1)
    try:
        assert not group_store(None).check(["nothing"])
        del server
        gc.collect()
        with pytest.raises(RuntimeError):
            group_store(None)
    finally:
        dist.destroy_process_group()


def test_a_forked_child_has_its_parents_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert not is_of_parent()
        child = os.fork()
        if not child:
            os._exit(2 + is_of_parent())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    finally:
        dist.destroy_process_group()


def test_a_build_without_nccl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(RuntimeError, match="this build of torch has no NCCL"):
        nccl_group(prefixed(dist.HashStore(), "x"), 0, 1, 1.0)  # type: ignore[arg-type]


def test_a_world_that_is_made_anew_has_another_number_and_the_old_one_is_let_go() -> None:
    numbers, worlds = [world_number()], []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        numbers += [world_number(), world_number()]
        worlds.append(weakref.ref(dist.group.WORLD))
        dist.destroy_process_group()
    assert numbers[0] == world_number() == 0
    assert numbers[1] == numbers[2] != numbers[3] == numbers[4]
    gc.collect()
    assert [world() for world in worlds] == [None, None]
