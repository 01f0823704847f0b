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


class _Penalised(nn.Module):
    """A critic, and the penalty on its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.enable_grad():
            at = hidden.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.critic(at).sum(), at, create_graph=True)
        return torch.cat([self.critic(hidden), gradient.square()], 1)


def test_a_gradient_that_goes_out_of_the_last_stage_is_refused_and_the_advice_works(pipe: Pipe) -> None:
    """Torch's "appears to not have been used in the graph" came out of the step."""
    batch = torch.randn(8, 4)

    def penalty(output: Tensor, inputs: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(output.sum(), inputs.requires_grad_(), create_graph=True)
        return gradient.square().mean()

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        Schedule1F1B(stage, 4, penalty).step(batch, target=batch.clone())

    with pytest.raises(
        ExecutionError, match=r"loss_fn takes the gradient of a tensor that the last stage do"
    ):
        InProcessWorld(2).run(body)

    model = _Penalised()
    where = {"critic": SplitPoint.BEGINNING}
    advised = pipeline(model, (batch[:2],), split_spec=where, frontend="modules")

    def advised_body(comm: Comm) -> dict[str, Tensor]:
        stage = advised.build_stage(comm.rank, comm=comm)
        Schedule1F1B(stage, 4, lambda output, _: output.mean()).step(batch, target=batch)
        return {
            name: weight.grad for name, weight in stage.module.named_parameters() if weight.grad is not None
        }

    gradients = {
        name: value.clone() for part in InProcessWorld(2).run(advised_body) for name, value in part.items()
    }
    model.zero_grad()
    for part in batch.split(2):
        (model(part).mean() / 4).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert torch.equal(gradients[name], weight.grad), name
