"""The model's own run of its example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from partita.capture.merging.own_run import OwnRun
from partita.errors import CaptureError


class Counting(nn.Module):
    """Branches on data, counts its calls, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.log: list[str] = []

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        if fails and not self.training:
            raise ArithmeticError("no such number")
        self.calls.add_(1)
        self.log.append("called")
        x.add_(torch.rand(()))
        return x if bool(x.sum() > 0) else -x


def test_answers_are_known_by_the_line_that_asks_and_nothing_is_changed() -> None:
    model, x, state = Counting(), torch.ones(3), torch.get_rng_state()
    for sign in (1, -9):
        answers = OwnRun(model, (sign * x,), {}).answers(training=True)
        assert answers is not None
        (answer,) = (answer for place, answer in answers.items() if "bool(x.sum() > 0)" in place)
        assert answer == [sign == 1]
    assert (model.calls.item(), model.log, model.training) == (0, [], True)
    assert torch.equal(x, torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_can_not_run_its_example_has_no_answers_and_is_told_apart() -> None:
    run = OwnRun(Counting(), (torch.ones(3),), {"fails": True})
    assert run.answers(training=False) is None
    run.check(training=True)
    with pytest.raises(CaptureError, match="Counting itself raises ArithmeticError with its example in eval"):
        run.check(training=False)


def test_without_memory_nothing_is_run() -> None:
    with torch.device("meta"):
        run = OwnRun(Counting(), (torch.ones(3),), {"fails": True})
    run.check(training=False)
