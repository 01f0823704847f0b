"""Activation checkpointing around stages, and inside the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from tests.pipelining.models import CALLED, OUTPUTS, REGIONS, TRANSFORMER, WIDTH, Case
from tests.pipelining.running import Record, assert_same, cut, piped, train, uncut
from torch import Tensor, nn
from torch.nn import functional

from partita.pipelining import Schedule1F1B, ScheduleGPipe
from partita.pipelining.schedules import PipelineSchedule
from partita.runtime import Comm, InProcessWorld


class Checkpointed(nn.Module):
    """Keeps what comes in, and computes the rest again in the backward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.module, *args, use_reentrant=False)


class ZeroBubble(PipelineSchedule):
    kind = "InterleavedZeroBubble"


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ZeroBubble], ids=lambda kind: kind.kind)
@pytest.mark.parametrize("case", [TRANSFORMER, REGIONS, OUTPUTS, CALLED], ids=lambda case: case.name)
def test_checkpointed_stages_equal_the_uncut_model_bit_for_bit(
    case: Case, kind: type[PipelineSchedule]
) -> None:
    """Dropout draws the same mask again, whatever has drawn since."""
    stages = len(case.after) + 1
    pipe = cut(case, stages)

    def body(comm: Comm) -> Record:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        module, record = stage.module, Record()
        stage.module = Checkpointed(module)
        train(kind(stage, 4, case.loss), [module], case, record)
        return record

    assert_same(InProcessWorld(stages).run(body), uncut(case))


class Inside(nn.Module):
    """A model that checkpoints its own middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(self._middle, self.a(x), use_reentrant=False)
        return self.d(h)

    def _middle(self, h: Tensor) -> Tensor:
        return self.c(functional.dropout(self.b(h).tanh(), 0.3, self.training))


def test_a_model_that_checkpoints_itself_computes_the_same() -> None:
    """The captured graph keeps what it computes and recomputes nothing: wrap the stage to save memory."""
    case = Case("inside", Inside, ("a", "c"))
    found = piped(cut(case, 3), case)
    assert_same(found, uncut(case))
    model, (args, _, target) = case.model().eval(), case.data(8)
    pipe = cut(case, 3).eval()
    case.loss(pipe(*(arg[:2] for arg in args)), target[:2]).backward()
    gradients = {name: value.grad.clone() for name, value in pipe.named_parameters()}
    case.loss(model(*(arg[:2] for arg in args)), target[:2]).backward()
    assert {name.split(".", 2)[-1] for name in gradients} == dict(model.named_parameters()).keys()
    for name, value in gradients.items():
        assert torch.equal(value, model.get_parameter(name.split(".", 2)[-1]).grad)
