"""What one rank can find wrong by itself it raises before it waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.errors import ExecutionError, MicrobatchError, SignatureMismatch
from partita.pipelining import Pipe, PipelineStage, Schedule1F1B, SplitPoint, pipeline
from partita.runtime import Comm, InProcessWorld

BATCH = torch.zeros(8, 4)


@pytest.fixture(scope="module")
def pipe() -> Pipe:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return pipeline(model, (BATCH[:2],), split_spec={"0": SplitPoint.END})


def _alone(build: Callable[[Comm], Any], rank: int, *args: Any, **kwargs: Any) -> None:
    """Only this rank makes a step: it would wait for ever."""

    def body(comm: Comm) -> None:
        schedule = Schedule1F1B(build(comm), 4, nn.functional.mse_loss)
        if comm.rank == rank:
            schedule.step(*args, **kwargs)
        comm.barrier()

    InProcessWorld(2).run(body)


def _plain(comm: Comm) -> PipelineStage:
    return PipelineStage(nn.Linear(4, 4), comm.rank, 2, "cpu", comm=comm)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((BATCH.double(),), SignatureMismatch, "float64"),
        ((BATCH[:, :3],), SignatureMismatch, r"\[2, 3\]"),
        ((BATCH, BATCH), ValueError, "takes 1 positional arguments, got 2"),
        ((BATCH[:3],), MicrobatchError, "a batch of 3 can't fill 4"),
    ],
)
def test_arguments_of_a_captured_stage(pipe: Pipe, args: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _alone(lambda comm: pipe.build_stage(comm.rank, comm=comm), 0, *args)


@pytest.mark.parametrize("as_modules", [False, True])
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"target": BATCH[:3]}, "a batch of 3 can't fill 4"),
        ({"target": BATCH, "loss_weights": (0.5, 0.5)}, "has 2 values for 4 microbatches"),
        ({"target_mbs": [BATCH] * 3}, "target_mbs has 3 microbatches, but the schedule has 4"),
        ({"target_mbs": [{"a": BATCH, "b": BATCH[:2]}] * 4}, "microbatch 0 has tensors that differ"),
    ],
)
def test_what_the_loss_is_given(pipe: Pipe, as_modules: bool, kwargs: Any, message: str) -> None:
    build = _plain if as_modules else lambda comm: pipe.build_stage(comm.rank, comm=comm)
    with pytest.raises(MicrobatchError, match=message):
        _alone(build, 1, **kwargs)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((BATCH[:3],), MicrobatchError, "a batch of 3 can't fill 4"),
        ((BATCH[:, :3],), ExecutionError, "stage 0"),
        ((BATCH, BATCH), ExecutionError, "stage 0"),
    ],
)
def test_arguments_of_a_stage_that_is_a_plain_module(args: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _alone(_plain, 0, *args)


@pytest.mark.parametrize("as_modules", [False, True])
def test_microbatches_that_the_user_has_made(pipe: Pipe, as_modules: bool) -> None:
    build = _plain if as_modules else lambda comm: pipe.build_stage(comm.rank, comm=comm)
    with pytest.raises(MicrobatchError, match="arg_mbs has 3 microbatches, but the schedule has 4"):
        _alone(build, 0, arg_mbs=[(BATCH,)] * 3)
    error = ExecutionError if as_modules else SignatureMismatch
    with pytest.raises(error, match=r"stage 0|\[8, 3\]"):
        _alone(build, 0, arg_mbs=[*[(BATCH,)] * 3, (BATCH[:, :3],)])


class Secretive(nn.Module):
    """Returns what no other process can be told."""

    def forward(self, x: Tensor) -> Any:
        return x, lambda: x


def test_a_result_that_can_not_be_sent() -> None:
    def build(comm: Comm) -> PipelineStage:
        return PipelineStage(Secretive(), comm.rank, 2, "cpu", comm=comm)

    with pytest.raises(ExecutionError, match="output of stage 0 holds function, which can't be sent"):
        _alone(build, 0, BATCH)
