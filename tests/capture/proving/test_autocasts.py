"""Models that ask for dtypes which autocast changes."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from tests.dtype_reading_norm import DtypeReadingNorm
from tests.pipelining.running import errors_of
from torch import Tensor, nn

from partita.errors import CaptureError
from partita.pipelining import Pipe, ScheduleGPipe, SplitPoint, pipeline
from partita.runtime import Comm, InProcessWorld

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [3, 2, 1]])
REFUSAL = r"Model asks for dtypes that autocast changes, and was cut {}.*cut it under the autocast"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.norm, self.b = (
            nn.Embedding(10, 8),
            nn.Linear(8, 8),
            DtypeReadingNorm(),
            nn.Linear(8, 3),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.b(self.norm(self.a(self.embed(tokens))))


MODEL = Model()


def bfloat16() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.fixture(scope="module")
def cut_without() -> Pipe:
    return _cut()


@pytest.fixture(scope="module")
def cut_under() -> Pipe:
    with bfloat16():
        return _cut()


def _cut() -> Pipe:
    return pipeline(copy.deepcopy(MODEL), (TOKENS[:2],), split_spec={"norm": SplitPoint.BEGINNING})


def test_a_cut_without_autocast_refuses_to_run_under_it(cut_without: Pipe) -> None:
    """The norm's ``x.dtype`` is in the graph as float32: under autocast the results were others."""
    assert torch.equal(cut_without(TOKENS), MODEL(TOKENS))
    with bfloat16(), pytest.raises(CaptureError, match=REFUSAL.format("without autocast")):
        cut_without(TOKENS)

    stage = copy.deepcopy(cut_without).build_stage(0)
    stage.compile("aot_eager")  # it warned that the stage runs uncompiled, before
    with bfloat16(), pytest.raises(CaptureError, match=REFUSAL.format("without autocast")):
        stage.module(TOKENS)

    def step(comm: Comm) -> None:
        schedule = ScheduleGPipe(copy.deepcopy(cut_without).build_stage(comm.rank, comm=comm), 2, _loss)
        with bfloat16():
            schedule.step(TOKENS, target=TOKENS)

    for error in errors_of(2, step):
        assert "asks for dtypes that autocast changes, and was cut without autocast" in str(error)


def test_cut_under_autocast_it_is_the_model_under_it(cut_under: Pipe) -> None:
    def step(comm: Comm) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        stage = copy.deepcopy(cut_under).build_stage(comm.rank, comm=comm)
        losses: list[Tensor] = []
        with bfloat16():
            ScheduleGPipe(stage, 2, _loss).step(TOKENS, target=TOKENS, losses=losses)
        return losses, {name: parameter.grad for name, parameter in stage.module.named_parameters()}

    first, second = InProcessWorld(2).run(step)
    model, expected = copy.deepcopy(MODEL), []
    for part in TOKENS.chunk(2):
        with bfloat16():
            expected.append(_loss(model(part), part))
        (expected[-1] / 2).backward()
    assert all(map(torch.equal, second[0], expected))
    gradients = first[1] | second[1]
    for name, parameter in model.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


@pytest.mark.parametrize("other", [nullcontext, lambda: torch.autocast("cpu", torch.float16)])
def test_cut_under_autocast_it_refuses_to_run_under_another(cut_under: Pipe, other: type) -> None:
    with (
        other(),
        pytest.raises(CaptureError, match=REFUSAL.format(r"under autocast\('cpu', torch.bfloat16\)")),
    ):
        cut_under(TOKENS)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.float().square().mean()
