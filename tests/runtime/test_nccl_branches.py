"""What the comm over processes does with tensors on a device: asked of groups that behave like NCCL's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.runtime.nccl_like import NcclLike, NcclLikeWorld, nccl_like
from tests.runtime.test_comm_contract import DTYPES, SHAPES, _pattern, _strided, _subset, _sums, _together
from tests.runtime.worlds import endings

from partita.errors import ExecutionError, PeerFailed
from partita.runtime import Comm
from partita.runtime.comms._starter import Starter

CPU = torch.device("cpu")
RANKS = 3
PAIRS = [(src, dst) for src in range(RANKS) for dst in range(RANKS) if src != dst]


def _members(comm: Any) -> dict[str, tuple[int, int]]:
    """This rank's place in each of its NCCL groups, and their sizes."""
    groups = {name: group for name, group in comm._groups.by_name.items() if name.startswith("nccl/")}
    assert all(isinstance(group, NcclLike) for group in groups.values())
    return {name: (group.rank(), group.size()) for name, group in groups.items()}


def _connected(comm: Comm) -> Any:
    comm.connect(reversed(PAIRS), CPU)
    first = _members(comm)
    comm.connect(PAIRS, CPU)
    return first, _members(comm)


def test_connect_opens_one_communicator_for_each_directed_pair_with_the_sender_as_member_0() -> None:
    for rank, (first, again) in enumerate(NcclLikeWorld(RANKS).run(_connected)):
        assert first == again
        assert first == {
            f"nccl/{src}>{dst}": (0 if rank == src else 1, 2) for src, dst in PAIRS if rank in {src, dst}
        }


def _exchange(comm: Comm) -> list[float]:
    comm.connect(PAIRS, CPU)
    others = [rank for rank in range(RANKS) if rank != comm.rank]
    sent = [comm.send(torch.full((100_000,), 10.0 * comm.rank + other), other) for other in others]
    buffers = [torch.empty(100_000) for _ in others]
    received = [comm.recv(buffer, other) for buffer, other in zip(buffers, others, strict=True)]
    for handle in sent + received:
        handle.wait()
    return [buffer.unique().item() for buffer in buffers]


def test_all_ranks_can_send_to_each_other_at_once() -> None:
    assert NcclLikeWorld(RANKS).run(_exchange) == [[10.0, 20.0], [1.0, 21.0], [2.0, 12.0]]


def _settled(comm: Any) -> list[list[list[str]]]:
    comm.connect([(0, 1), (1, 0)], CPU)
    groups = [group for group in comm._groups.by_name.values() if isinstance(group, NcclLike)]
    for group in groups:
        group.messages.clear()
    other, seen = 1 - comm.rank, []
    handles = [comm.send(torch.ones(2), other) for _ in range(3)]
    handles += [comm.recv(torch.empty(2), other) for _ in range(3)]
    for _ in range(2):
        for handle in handles:
            handle.wait()
        seen.append(sorted(list(message.by) for group in groups for message in group.messages))
        comm.synchronize()
    comm.synchronize()
    return [*seen, sorted(list(message.by) for group in groups for message in group.messages)]


def test_the_device_waits_for_messages_and_the_host_for_the_last_of_each_pair_in_the_end() -> None:
    device, both = ["device"], ["device", "host"]
    for once, twice, settled in NcclLikeWorld(2).run(_settled):
        assert once == [device] * 6
        assert twice == settled == [*[device] * 4, both, both]


def _every_dtype(comm: Comm) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        for shape in SHAPES:
            there = _pattern(shape, dtype)
            here = torch.zeros(shape, dtype=dtype)
            (comm.send(there, 1) if comm.rank == 0 else comm.recv(here, 0)).wait()
            if comm.rank == 1 and not torch.equal(here, there):
                wrong.append(f"{dtype} {shape}")
    return wrong


def test_types_that_nccl_has_not_arrive_too() -> None:
    assert NcclLikeWorld(2).run(_every_dtype) == [[], []]


@pytest.mark.parametrize(
    ("body", "expected"),
    [(_strided, [True, True]), (_sums, [[], []]), (_together, [[], [True, True, True]])],
    ids=["strides", "sums", "together"],
)
def test_what_every_comm_promises_holds_on_a_device_too(body: Any, expected: Any) -> None:
    assert NcclLikeWorld(2).run(body) == expected


def _subsets(comm: Comm) -> Any:
    return _subset(comm), sorted(_members(comm).items())


def test_collectives_take_all_ranks_or_a_subset_each_with_a_communicator_of_its_own() -> None:
    results = NcclLikeWorld(RANKS).run(_subsets)
    for rank, (values, groups) in enumerate(results):
        assert values == [6.0, 2.0, 5.0]
        expected = {f"nccl/reduce/({rank},)": (0, 1), "nccl/reduce/(0, 1, 2)": (rank, 3)}
        if rank != 1:
            expected["nccl/reduce/(0, 2)"] = (rank // 2, 2)
        assert dict(groups) == expected


def _bytes_and_objects(comm: Comm) -> Any:
    other = 1 - comm.rank
    comm.send_object("x", other)
    buffer = torch.zeros(3, dtype=torch.uint8)
    handles = [comm.send(torch.ones(3, dtype=torch.uint8), other), comm.recv(buffer, other)]
    for handle in handles:
        handle.wait()
    return comm.recv_object(other), buffer.tolist(), _members(comm)


def test_what_is_on_the_cpu_and_objects_go_through_gloo() -> None:
    assert NcclLikeWorld(2).run(_bytes_and_objects) == [("x", [1, 1, 1], {})] * 2


def _connect_on_the_cpu(comm: Comm) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Starter, "on_nccl", lambda *_: False)
        comm.connect(PAIRS, CPU)
    return _members(comm)


def test_connect_opens_nothing_where_the_tensors_are_on_the_cpu() -> None:
    assert NcclLikeWorld(RANKS).run(_connect_on_the_cpu) == [{}] * RANKS


# --- failures -----------------------------------------------------------------


def _fail_while_others_wait(comm: Comm) -> None:
    with nccl_like(comm) as nccl:
        nccl.connect(PAIRS, CPU)
        groups = [group for group in nccl._groups.by_name.values() if isinstance(group, NcclLike)]
        if nccl.rank == 1:
            raise ValueError("the loss is not finite")
        try:
            nccl.recv(torch.zeros(1), 2 - nccl.rank).wait()  # from each other
        finally:
            assert all(group.aborted.wait(10.0) for group in groups)


def _fail_before_others_connect(comm: Comm) -> None:
    with nccl_like(comm) as nccl:
        if nccl.rank == 1:
            raise ValueError("the loss is not finite")
        nccl.connect(PAIRS, CPU)


def _fail_before_others_reduce(comm: Comm) -> None:
    with nccl_like(comm) as nccl:
        if nccl.rank == 1:
            raise ValueError("the loss is not finite")
        nccl.all_reduce(torch.ones(1), (0, 1, 2)).wait()


@pytest.mark.parametrize(
    "body",
    [_fail_while_others_wait, _fail_before_others_connect, _fail_before_others_reduce],
    ids=["in a receive", "in connect", "before the first all_reduce"],
)
def test_a_failure_reaches_those_who_wait_for_a_device(body: Any) -> None:
    for rank, ending in enumerate(endings(RANKS, body)):
        if rank == 1:
            assert isinstance(ending.error, ValueError), ending.text
        else:
            assert isinstance(ending.error, PeerFailed), ending.text
            assert ending.error.rank == 1
            assert "the loss is not finite" in str(ending.error)


class _Slow:
    """An operation that NCCL gives up on."""

    def wait(self, timeout: Any = None) -> bool:
        raise RuntimeError(
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=RECV) ran for "
            f"{timeout} milliseconds before timing out."
        )


def _times_out(comm: Comm) -> None:
    with nccl_like(comm) as nccl:
        nccl.connect([(0, 1), (1, 0)], CPU)
        if comm.rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(NcclLike, "recv", lambda *_: _Slow())
                nccl.recv(torch.zeros(1), 1).wait()
        nccl.recv(torch.zeros(1), 0).wait()


def test_a_peer_that_is_slow_on_a_device_is_not_taken_for_dead() -> None:
    waiting, silent = endings(2, _times_out)
    assert isinstance(waiting.error, ExecutionError)
    assert not isinstance(waiting.error, PeerFailed)
    assert "rank 0 waited 20 s in recv from rank 1 (tag 0), and rank 1, though alive" in str(waiting.error)
    assert isinstance(silent.error, PeerFailed)
