"""Nothing of a model's state is lost when it is cut."""

from __future__ import annotations

import pytest
import torch
from tests.pipelining.models import CALLED, CASES, NORMED, Case
from tests.pipelining.resuming import pipe_of
from torch import Tensor, nn

from partita.errors import CheckpointError
from partita.pipelining import SplitPoint, pipeline
from partita.pipelining.checkpoints.state_report import state_report


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stages_together_have_every_name_of_the_models_state_dict(case: Case) -> None:
    model = case.model()
    report = state_report(pipe_of(len(case.after) + 1, case), model).check()
    assert (report.missing, report.surplus) == ((), ())
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    assert report.stages.keys() == names


def test_unused_state_is_told_and_kept() -> None:
    report = state_report(pipe_of(4, NORMED))
    assert set(report.unused) == {"kept", "unused.weight", "unused.bias"}
    for name, stage in report.unused.items():
        assert report.stages[name] == (stage,)


class _OtherInTraining(nn.Module):
    """An auxiliary head in training only, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = (nn.Linear(2, 2) for _ in range(3))
        self.spare = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x))
        return y + self.head(y).mean(0, keepdim=True) if self.training else y.relu()


def test_of_a_model_that_does_something_else_in_training_both_modes_count() -> None:
    model = _OtherInTraining()
    pipe = pipeline(model, (torch.zeros(2, 2),), split_spec={"one": SplitPoint.END})
    for mode in (True, False):
        assert set(state_report(pipe.train(mode), model).check().unused) == {"spare"}


def test_of_a_model_that_is_cut_without_capturing_it_nothing_is_told_to_be_unused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.spare = nn.Parameter(torch.zeros(1))
    points = {"0": SplitPoint.END}
    pipe = pipeline(model, (torch.zeros(1, 2),), split_spec=points, frontend="modules")
    report = state_report(pipe, model).check()
    assert (report.stages["0.weight"], report.stages["1.bias"]) == ((0,), (1,))
    assert "spare" in report.stages
    assert not report.unused


def test_a_module_that_runs_in_two_stages_has_its_own_name_in_both() -> None:
    report = state_report(pipe_of(3, CALLED))
    assert report.stages["a.weight"] == (0, 2)
    assert not any("@" in name for name in report.stages)


def test_non_persistent_buffers_stay_out_of_the_state_dict() -> None:
    pipe = pipe_of(4, NORMED)
    assert "scale" in state_report(pipe).stages
    assert not any("scale" in pipe.get_stage_module(index).state_dict() for index in range(4))


class _Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_what_is_not_captured_is_named() -> None:
    model = nn.Sequential(_Extra(2, 2), nn.Linear(2, 2))
    pipe = pipeline(model, (torch.zeros(1, 2),), split_spec={"0": SplitPoint.END})
    with pytest.raises(
        CheckpointError, match=r"no stage has '0._extra_state' of the model's state_dict\(\): "
    ):
        state_report(pipe, model).check()


def test_another_model_is_noticed() -> None:
    pipe = pipe_of(4, NORMED)
    with pytest.raises(
        CheckpointError, match=r"stages have .* in their state_dict\(\), which the model's own"
    ):
        state_report(pipe, nn.Identity()).check()
