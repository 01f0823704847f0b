"""Stages of ``frontend="modules"`` whose backward passes can't be cut in two."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.group_of_one import group_of_one
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from partita.pipelining import Schedule1F1B, ScheduleZBVZeroBubble, SplitPoint, pipeline
from partita.pipelining.stages import Stage
from partita.runtime import Comm, InProcessWorld

BATCH, TARGET = torch.randn(4, 8), torch.randn(4, 8)


def _shard(stage: Stage) -> None:
    fully_shard(stage.module)


def _replicate(stage: Stage) -> None:
    stage.module = DistributedDataParallel(stage.module, find_unused_parameters=True)


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("wrap", [_shard, _replicate], ids=["fully_shard", "DistributedDataParallel"])
def test_a_wrapped_stage_runs_backward_whole_where_the_schedule_cuts_it(
    wrap: Callable[[Stage], None],
) -> None:
    """I of such a stage runs the whole pass; it did not bundle gradients: KeyError, 'output of stage 0'."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    expected = copy.deepcopy(model)
    pipe = pipeline(model, (BATCH[:2],), split_spec={"1": SplitPoint.BEGINNING}, frontend="modules")

    def run(comm: Comm) -> list[Tensor]:
        stages = [pipe.build_stage(index, comm=comm) for index in range(2)]
        for stage in stages:
            wrap(stage)
        ScheduleZBVZeroBubble(stages, 2, functional.mse_loss).step(BATCH, target=TARGET)
        return [_whole(parameter.grad) for stage in stages for parameter in stage.module.parameters()]

    with group_of_one():
        actual = InProcessWorld(1).run(run)[0]
    for x, target in zip(BATCH.split(2), TARGET.split(2), strict=True):
        (functional.mse_loss(expected(x), target) / 2).backward()
    assert len(actual) == 4
    for here, there in zip(actual, expected.parameters(), strict=True):
        assert torch.equal(here, _whole(there.grad))


class _LetsItsInputRequireGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad = True
        return self.last(self.first(x)) + x  # type: ignore[no-any-return]


def test_an_input_that_forward_lets_require_gradients_has_none_for_the_caller() -> None:
    """Torch's own error ended the backward pass of stage 0: what the caller has requires no gradient."""
    model = _LetsItsInputRequireGradients()
    expected = copy.deepcopy(model)
    pipe = pipeline(model, (BATCH[:2],), stages=2, frontend="modules")

    def run(comm: Comm) -> list[Tensor]:
        stage = pipe.build_stage(comm.rank, comm=comm)
        Schedule1F1B(stage, 2, functional.mse_loss).step(BATCH, target=TARGET)
        return [_whole(parameter.grad) for parameter in stage.module.parameters()]

    actual = [gradient for of_rank in InProcessWorld(2).run(run) for gradient in of_rank]
    for x, target in zip(BATCH.split(2), TARGET.split(2), strict=True):
        (functional.mse_loss(expected(x), target) / 2).backward()
    assert not BATCH.requires_grad
    for here, there in zip(actual, expected.parameters(), strict=True):
        assert torch.equal(here, _whole(there.grad))
