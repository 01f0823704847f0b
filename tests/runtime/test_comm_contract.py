"""What every comm promises, asked of both: the one over processes and the one in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.runtime.worlds import ProcessWorld

from partita.runtime import MAX_TAG, Comm, InProcessWorld

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SHAPES = ((3, 2), (), (0, 4), (5,))


@pytest.fixture(params=[InProcessWorld, ProcessWorld], ids=["in-process", "processes"])
def world(request: pytest.FixtureRequest) -> Any:
    return request.param


def _pattern(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) % 2 + 1).reshape(shape).to(dtype)


def _every_dtype_and_shape(comm: Comm) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        for shape in SHAPES:
            there = _pattern(shape, dtype)
            if comm.rank == 0:
                comm.send(there, 1, tag=3).wait()
                continue
            here = torch.zeros(shape, dtype=dtype)
            comm.recv(here, 0, tag=3).wait()
            if not torch.equal(here, there):
                wrong.append(f"{dtype} {shape}")
    return wrong


def test_tensors_of_every_dtype_arrive_with_their_bits_also_empty_and_0d_ones(world: Any) -> None:
    assert world(2).run(_every_dtype_and_shape) == [[], []]


def _sums(comm: Comm) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        for shape in SHAPES:
            tensor = _pattern(shape, dtype)
            comm.all_reduce(tensor, (0, 1)).wait()
            if not torch.equal(tensor, _pattern(shape, dtype) + _pattern(shape, dtype)):
                wrong.append(f"{dtype} {shape}")
    return wrong


def test_all_reduce_sums_every_dtype(world: Any) -> None:
    assert world(2).run(_sums) == [[], []]


def _broadcasts(comm: Comm) -> list[str]:
    wrong = []
    for dtype in (*DTYPES, torch.uint16, torch.uint64, torch.float8_e4m3fn):
        for shape in SHAPES:
            there = _pattern(shape, dtype)
            tensor = torch.zeros_like(there) if comm.rank else there.clone()
            comm.broadcast(tensor, 0).wait()
            if not torch.equal(tensor.view(-1).view(torch.uint8), there.view(-1).view(torch.uint8)):
                wrong.append(f"{dtype} {shape}")
    return wrong


def test_every_dtype_is_broadcast(world: Any) -> None:
    """gloo has no type for some, and the error said to look at the network."""
    assert world(2).run(_broadcasts) == [[], []]


def _strided(comm: Comm) -> Any:
    full = torch.arange(24.0).reshape(4, 6)
    if comm.rank == 0:
        comm.send(full.t(), 1).wait()
        comm.send(full[:, ::2], 1).wait()
        comm.send(torch.complex(full, full).conj(), 1).wait()
        comm.send(torch.nn.Parameter(full), 1).wait()
        sums = full.clone().t()
        comm.all_reduce(sums, (0, 1)).wait()
        return torch.equal(sums, 2 * full.t())
    transposed = torch.zeros(4, 6).t()
    every_second = torch.zeros(4, 6)[:, ::2]
    conjugate = torch.zeros(4, 6, dtype=torch.complex64)
    parameter = torch.zeros(4, 6)
    comm.recv(transposed, 0).wait()
    comm.recv(every_second, 0).wait()
    comm.recv(conjugate, 0).wait()
    comm.recv(parameter, 0).wait()
    expected = torch.arange(24.0).reshape(4, 6)
    sums = expected.t().contiguous()
    comm.all_reduce(sums, (0, 1)).wait()
    return (
        torch.equal(transposed, expected.t())
        and torch.equal(every_second, expected[:, ::2])
        and torch.equal(conjugate, torch.complex(expected, expected).conj())
        and torch.equal(parameter, expected)
        and torch.equal(sums, 2 * expected.t())
    )


def test_non_contiguous_conjugate_and_grad_requiring_tensors_arrive_as_values(world: Any) -> None:
    assert world(2).run(_strided) == [True, True]


def _together(comm: Comm) -> list[Any]:
    full = torch.arange(24.0).reshape(4, 6)
    tags, trailer = (5, 9, 6), torch.tensor([3, 4])
    if comm.rank == 0:
        handles = [comm.send_together([factor * full.t(), full > 3, trailer], 1, tags) for factor in (1, 2)]
        handles.append(comm.send_together([full], 1, tags[:1]))  # one alone, under a tag of the others
        for handle in handles:
            handle.wait()
            handle.wait()
        return []
    buffers = [[torch.zeros(6, 4), torch.zeros(4, 6, dtype=torch.bool), torch.zeros(2).long()] for _ in "ab"]
    handles = [comm.recv_together(message, 0, tags) for message in buffers]
    handles.append(comm.recv_together([alone := torch.zeros(4, 6)], 0, tags[:1]))
    for handle in handles:
        handle.wait()
        handle.wait()
    equal = [
        torch.equal(first, factor * full.t()) and torch.equal(second, full > 3) and torch.equal(last, trailer)
        for factor, (first, second, last) in zip((1, 2), buffers, strict=True)
    ]
    return [*equal, torch.equal(alone, full)]


def test_messages_that_are_sent_together_arrive_each_under_its_tag(world: Any) -> None:
    assert world(2).run(_together) == [[], [True, True, True]]


def _order(comm: Comm) -> list[float]:
    if comm.rank == 0:
        handles = [comm.send(torch.tensor(float(10 * tag + i)), 1, tag) for i in range(3) for tag in (7, 8)]
        for handle in handles:
            handle.wait()
        return []
    buffers = [torch.zeros(()) for _ in range(6)]
    handles = [comm.recv(buffers[i], 0, tag) for i, tag in enumerate((8, 8, 8, 7, 7, 7))]
    for handle in handles:
        handle.wait()
    return [buffer.item() for buffer in buffers]


def test_messages_of_one_tag_keep_their_order_and_tags_do_not_mix(world: Any) -> None:
    assert world(2).run(_order)[1] == [80.0, 81.0, 82.0, 70.0, 71.0, 72.0]


def _swap(comm: Comm) -> float:
    other = 1 - comm.rank
    mine, theirs = torch.full((200_000,), float(comm.rank)), torch.empty(200_000)
    sent, received = comm.send(mine, other), comm.recv(theirs, other)
    sent.wait()
    received.wait()
    return theirs.unique().item()


def test_two_ranks_can_send_to_each_other_at_once(world: Any) -> None:
    assert world(2).run(_swap) == [1.0, 0.0]


def _objects(comm: Comm) -> Any:
    small, large = {"shape": (2, 3), "dtype": torch.float32}, list(range(5000))
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.send_object(small, right)
    comm.send_object(large, right)
    comm.send_object((comm.rank, None), right)
    received = [comm.recv_object(left) for _ in range(3)]
    return received == [small, large, (left, None)], comm.all_gather_object(comm.rank**2)


def test_objects_small_and_large_go_around_a_ring_and_are_gathered(world: Any) -> None:
    assert world(3).run(_objects) == [(True, [0, 1, 4])] * 3


def _subset(comm: Comm) -> list[float]:
    total, pair = torch.tensor([1.0 + comm.rank]), torch.tensor([1.0 + comm.rank])
    if comm.rank != 1:
        comm.all_reduce(pair, (2, 0)).wait()
        comm.all_reduce(pair, (0, 2)).wait()
    comm.all_reduce(total, (0, 1, 2)).wait()
    alone = torch.tensor([5.0])
    comm.all_reduce(alone, (comm.rank,)).wait()
    comm.broadcast(pair, 1).wait()
    comm.barrier()
    return [total.item(), pair.item(), alone.item()]


def test_collectives_take_all_ranks_or_a_subset(world: Any) -> None:
    assert world(3).run(_subset) == [[6.0, 2.0, 5.0]] * 3


def _alone(comm: Comm) -> Any:
    comm.barrier()
    comm.connect([])
    tensor = torch.ones(2)
    comm.all_reduce(tensor, (0,)).wait()
    comm.broadcast(tensor, 0).wait()
    return isinstance(comm, Comm), comm.all_gather_object("x"), tensor.tolist()


def test_a_world_of_one_rank_works(world: Any) -> None:
    assert world(1).run(_alone) == [(True, ["x"], [1.0, 1.0])]


def _misuse(comm: Comm) -> list[str]:
    tensor = torch.ones(1)
    texts = []
    for call in (
        lambda: comm.send(tensor, 2),
        lambda: comm.send(tensor, comm.rank),
        lambda: comm.recv(tensor, -1),
        lambda: comm.send(tensor, 1 - comm.rank, tag=MAX_TAG + 1),
        lambda: comm.all_reduce(tensor, (1 - comm.rank,)),
        lambda: comm.all_reduce(tensor, (0, 0, 1)),
        lambda: comm.broadcast(tensor, 9),
    ):
        try:
            call()
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_wrong_ranks_and_tags_are_refused_with_the_limit(world: Any) -> None:
    texts = world(2).run(_misuse)[0]
    assert texts == [
        "no rank 2 here: this comm has ranks 0 to 1",
        "rank 0 sends to itself: hand the value over without the comm",
        "no rank -1 here: this comm has ranks 0 to 1",
        f"tag ({MAX_TAG + 1}) must lie between 0 and {MAX_TAG}",
        "rank 0 calls a collective over (1,), to which it does not belong",
        "ranks (0, 0, 1) must be distinct and lie between 0 and 1",
        "no rank 9 here: this comm has ranks 0 to 1",
    ]


def _closes_twice(comm: Comm) -> str:
    comm.barrier()
    comm.close()
    comm.close()
    try:
        comm.barrier()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_closed_comm_says_so(world: Any) -> None:
    assert "rank 0 uses a comm that it has closed" in world(1).run(_closes_twice)[0]
    assert "rank 1 uses a comm that it has closed" in world(2).run(_closes_twice)[1]
