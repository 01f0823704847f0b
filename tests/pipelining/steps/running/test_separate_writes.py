"""Microbatches that are written to apart from each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.pipelining import ScheduleGPipe, SplitPoint, pipeline
from partita.pipelining.steps.running.separate_writes import SeparateWrites
from partita.runtime import Comm, InProcessWorld

WIDTH, MICROBATCHES = 4, 2


class WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        output: Tensor = self.b(self.a(x))
        return output


def loss_of(output: Tensor, _target: object = None) -> Tensor:
    return output.square().mean()


def batch() -> Tensor:
    return torch.randn(MICROBATCHES * 2, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("frontend", ["export", "modules"])
@pytest.mark.parametrize("cut_by_user", [False, True])
def test_a_model_that_writes_to_its_input_trains_as_uncut(frontend: Any, cut_by_user: bool) -> None:
    """One microbatch's write made autograd refuse to go back through another's, as views of one batch."""
    model = WritesToItsInput()
    pipe = pipeline(model, (batch()[:2],), split_spec={"b": SplitPoint.BEGINNING}, frontend=frontend)
    written = batch()

    def train(comm: Comm) -> None:
        schedule = ScheduleGPipe(pipe.build_stage(comm.rank, comm=comm), MICROBATCHES, loss_of)
        if cut_by_user:
            schedule.step(arg_mbs=[(part,) for part in written.chunk(MICROBATCHES)])
        elif comm.rank == 0:
            schedule.step(written)
        else:
            schedule.step()

    InProcessWorld(2).run(train)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    expected = batch()
    for part in expected.chunk(MICROBATCHES):
        (loss_of(model(part)) / MICROBATCHES).backward()
    assert torch.equal(written, expected)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


def test_the_callers_batch_counts_as_written_to_once_the_step_is_over() -> None:
    whole = torch.zeros(4, 2)
    first, second = whole.chunk(2)
    writes = SeparateWrites([{"x": first}, {"x": second}])
    before = whole._version
    writes.arguments[0]["x"].add_(1)
    assert whole._version == before
    assert whole.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    writes.count()
    assert whole._version > before


@pytest.mark.parametrize(
    "microbatches",
    [
        [torch.zeros(2)] * 2,
        [*torch.zeros(1, 2).expand(2, 2)],
        [*torch.zeros(2, 2, requires_grad=True)],
        [*torch.zeros(4).unfold(0, 3, 1)],
    ],
    ids=["one tensor for all", "one row for all", "trained", "rows that overlap"],
)
def test_what_is_shared_or_trained_stays_the_callers_own(microbatches: list[Tensor]) -> None:
    """There a write of one microbatch does spoil what another has saved, and autograd says so."""
    arguments = SeparateWrites([{"x": one} for one in microbatches]).arguments
    assert all(one["x"] is own for one, own in zip(arguments, microbatches, strict=True))
