"""Stages whose part of ``forward`` calls other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.worlds import endings
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from partita.ddp import replicate
from partita.errors import ExecutionError
from partita.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline
from partita.pipelining.stages.other_ranks import check_ranks_come
from partita.runtime import Comm

_own_groups: list[dist.ProcessGroup] = []
"""The group of this process alone, where it has made one."""


class Synchronises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        mean = x.detach().mean(0)
        dist.all_reduce(mean, group=_own_groups[0] if _own_groups else None)
        return self.b(x - mean)


def _losses(comm: Comm, frontend: Any, alone: bool, train: bool = True) -> list[float]:
    if alone:
        _own_groups.append([dist.new_group([rank]) for rank in range(comm.size)][comm.rank])
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    spec = {"b": SplitPoint.BEGINNING}
    pipe = pipeline(Synchronises(), (x[:2],), split_spec=spec, frontend=frontend)
    losses: list[Tensor] = []
    stage = pipe.build_stage(comm.rank, comm=comm if alone else None)
    schedule = Schedule1F1B(stage, 2, functional.mse_loss)
    run = schedule.step if train else schedule.eval
    run(x, target=x, losses=losses)
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("train", [True, False], ids=["step", "evaluation"])
@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_collective_that_other_stages_do_not_call_is_refused(frontend: str, train: bool) -> None:
    """It waited for them until the group's timeout, as the codebooks of vector-quantize-pytorch did."""
    message = r"torch\.distributed\.all_reduce\(\) in the model's forward, stage 0, is for ranks \[0, 1\], of"
    first, second = endings(2, _losses, frontend, False, train)
    with pytest.raises(ExecutionError, match=message):
        raise first.error or AssertionError(first.text)
    assert second.error is not None


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_collective_of_ranks_with_the_same_stage_runs(frontend: str) -> None:
    """Each rank's group has a name of its own: captured, those were taken for different models."""
    first, second = endings(2, _losses, frontend, True)
    assert first.error is second.error is None, (first.text, second.text)
    assert len(second.result) == 2


def _wrapped_over_all(comm: Comm, how: str, frontend: Any) -> None:
    x = torch.randn(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pipeline(model, (x[:2],), split_spec={"0": SplitPoint.END}, frontend=frontend)
    stage = pipe.build_stage(comm.rank)
    if how == "ddp":
        stage.module = DistributedDataParallel(stage.module)
    else:
        fully_shard(stage.module)
    Schedule1F1B(stage, 2, functional.mse_loss).step(x, target=x)


@pytest.mark.parametrize("frontend", ["export", "modules"])
@pytest.mark.parametrize("how", ["ddp", "fully_shard"])
def test_replicas_on_ranks_that_run_other_stages_are_refused(how: str, frontend: str) -> None:
    """Both take all ranks where nobody says otherwise. It hung until the group's timeout, and the second
    stage had the weights of the first one.
    """
    message = r"stage \d is data parallel, or sharded, over ranks \[0, 1\], of which \[\d\] run other stages"
    for end in endings(2, _wrapped_over_all, how, frontend):
        with pytest.raises(ExecutionError, match=message):
            raise end.error or AssertionError(end.text)


def _replicated_over_all(comm: Comm) -> None:
    x = torch.randn(4, 4)
    stage = PipelineStage(replicate(nn.Linear(4, 4)), comm.rank, comm.size, torch.device("cpu"))
    Schedule1F1B(stage, 2, functional.mse_loss).step(*(x,) * stage.is_first, target=x)


def test_so_are_those_of_partitas_own_replicate() -> None:
    """The ranks waited for each other, and the error said so and no more."""
    for end in endings(2, _replicated_over_all):
        with pytest.raises(
            ExecutionError, match=r"stage \d is data parallel, or sharded, over ranks \[0, 1\]"
        ):
            raise end.error or AssertionError(end.text)


def test_other_functions_are_none_of_its_business() -> None:
    check_ranks_come(torch.add, (torch.ones(1), torch.ones(1)), {}, (0, 1), "b, stage 1")
