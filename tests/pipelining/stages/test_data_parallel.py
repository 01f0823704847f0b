"""When gradients are reduced. What comes of it, between processes: ``tests/composition``."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.group_of_one import group_of_one
from tests.runtime.worlds import ProcessWorld
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

import partita.ddp
from partita._torch.distributed.gradient_sync import sharded_roots
from partita.errors import ExecutionError
from partita.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    SplitPoint,
    pipeline,
)
from partita.pipelining.stages.data_parallel import GradientReduction, gradient_reduction
from partita.runtime import Comm, InProcessWorld

CPU = torch.device("cpu")


def test_a_plain_module_reduces_nothing() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert sharded_roots(module) == []
    assert gradient_reduction(module) is None
    assert gradient_reduction(torch.compile(module, backend="eager")) is None


def test_torchs_composable_replicate_is_refused() -> None:
    """It reduces within every microbatch: weights were off by millionths, and replicas differed."""

    def refused() -> None:  # the module is gone with it, before the group
        module = nn.Sequential(nn.Linear(2, 2))
        replicate(module)
        with pytest.raises(
            ExecutionError, match=r"composable replicate\(\), which reduces in every microbatch"
        ):
            gradient_reduction(nn.Sequential(module))

    with group_of_one():
        refused()


def test_a_module_that_partita_replicates_reduces_once_a_step() -> None:
    """It did in every microbatch: as many messages as microbatches, and other roundings than the model's."""

    def body(comm: Comm) -> list[int]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        x = torch.randn(8, 4)
        pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.END})
        stages = [pipe.build_stage(index, comm=comm) for index in range(2)]
        passes = [0, 0]
        for stage in stages:
            stage.module = module = partita.ddp.replicate(stage.module, comm)

            def count(_: object, index: int = stage.index) -> None:
                passes[index] += 1

            module.replication.reducer.pass_ended = count
        schedule = Schedule1F1B(stages, 4, nn.functional.mse_loss)
        for _ in range(2):
            schedule.step(x, target=x)
        reduction = gradient_reduction(stages[0].module)
        assert reduction is not None
        with pytest.raises(
            ExecutionError, match=r"stage 0 went through partita\.ddp\.replicate and is to be"
        ):
            reduction.check_recompute(0)
        return passes

    assert InProcessWorld(1).run(body) == [[2, 2]]


def _part() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def _batch(rank: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))


def _train_parts(comm: Comm, kind: Any, replicates: Any) -> bytes:
    """The gradients of parts that are replicated, and those of the others, of a pipeline on each rank."""
    alone = [dist.new_group([rank]) for rank in range(comm.size)][comm.rank]
    torch.manual_seed(0)
    parts = [_part(), _part()]
    for part in parts:
        part[1] = replicates(part[1])  # type: ignore[index, operator]
    stages = [PipelineStage(part, index, 2, CPU, group=alone) for index, part in enumerate(parts)]
    schedule = kind(stages, 4, nn.functional.mse_loss)
    for _ in range(2):
        schedule.step(_batch(comm.rank), target=_batch(comm.rank))
    schedule.close()
    return pickle.dumps([_gradients(parts, 1), _gradients(parts, 0)])


def _gradients(parts: Iterable[nn.Module], place: int) -> list[Tensor]:
    return [value.grad for part in parts for value in part[place].parameters()]  # type: ignore[index, misc, operator]


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ScheduleInterleavedZeroBubble])
@pytest.mark.parametrize("replicates", [DistributedDataParallel, partita.ddp.replicate])
def test_parts_of_a_stage_are_reduced_once_a_step_and_the_others_not(kind: Any, replicates: Any) -> None:
    """Torch's wrapper looks at one pass at a time: with several on their way, gradients were others than
    their mean, without a word.
    """
    by_rank = map(pickle.loads, ProcessWorld(2).run(_train_parts, kind, replicates))
    torch.manual_seed(0)
    whole = nn.Sequential(_part(), _part())
    expected = []
    for rank in range(2):
        whole.zero_grad()
        for x in _batch(rank).split(2):
            (nn.functional.mse_loss(whole(x), x) / 2).backward()  # of two steps
        expected.append((_gradients(whole, 1), _gradients(whole, 0)))
    for rank, (replicated, others) in enumerate(by_rank):
        mean = [(here + there) / 2 for here, there in zip(expected[0][0], expected[1][0], strict=True)]
        torch.testing.assert_close(replicated, mean)
        torch.testing.assert_close(others, expected[rank][1])


def test_a_stage_with_a_wrapped_part_is_not_recomputed() -> None:
    with group_of_one():
        reduction = gradient_reduction(nn.Sequential(DistributedDataParallel(nn.Linear(2, 2))))
        assert reduction is not None
        with pytest.raises(
            ExecutionError, match=r"stage 3 has DistributedDataParallel around a part of it and"
        ):
            reduction.check_recompute(3)


def test_a_last_microbatch_without_gradients_is_an_error() -> None:
    reduction = GradientReduction(nn.Linear(2, 2))
    reduction.begin(2)
    ran: list[int] = []
    reduction.backward([], lambda: ran.append(0))
    with pytest.raises(ExecutionError, match="does not depend on this stage, which is data parallel"):
        reduction.backward([], lambda: ran.append(1))
    assert ran == []
    reduction.module.requires_grad_(False)  # since the step began, or before: nothing is to be reduced
    reduction.begin(1)
    reduction.backward([], lambda: ran.append(2))
    assert ran == []


def test_an_earlier_microbatch_without_gradients_is_none() -> None:
    reduction = GradientReduction(nn.Linear(2, 2))
    reduction.begin(2)
    ran: list[int] = []
    reduction.backward([], lambda: ran.append(0))
    reduction.backward([torch.ones(1)], lambda: ran.append(1))
    assert ran == [1]
    assert reduction.at_once


def test_a_static_graph_is_refused_where_there_are_several_microbatches() -> None:
    """torch fails there with an assertion of its own."""
    wrapped = SimpleNamespace(static_graph=True, require_backward_grad_sync=True)
    reduction = GradientReduction(nn.Linear(2, 2), replicated=[wrapped])
    reduction.begin(1)
    with pytest.raises(ExecutionError, match="and a step has 2, of which only the last may reduce: leave"):
        reduction.begin(2)
