"""A model that is changed after the cut: its stages run on as they were cut, and nobody heard of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partita.errors import ExecutionError
from partita.pipelining import Schedule1F1B, SplitPoint, pipeline
from partita.pipelining.stages.stage import Stage
from partita.runtime import Comm, InProcessWorld

FRONTENDS = pytest.mark.parametrize("frontend", ["export", "modules"])


class Warm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x)) / self.temperature)


def _losses(
    change: Callable[[nn.Module, Stage], object],
    frontend: Any,
    kind: type[nn.Module] = Warm,
    **options: Any,
) -> list[float]:
    """The losses of a step, and of one after a change on both ranks, with equal random numbers."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 4)
    cut = {"head": SplitPoint.BEGINNING}
    pipe = pipeline(model, (x[:2],), split_spec=cut, frontend=frontend, **options)

    def body(comm: Comm) -> list[float]:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 2, functional.mse_loss)
        totals: list[float] = []
        for number in range(2):
            losses: list[Tensor] = []
            if number:
                change(model, stage)
            schedule.load_state_dict({"steps": 0})
            schedule.step(x, target=torch.zeros(4, 4), losses=losses)
            totals += [sum(losses).item()] if losses else []
        return totals

    return InProcessWorld(2).run(body)[1]


def _set_temperature(model: nn.Module, stage: Stage) -> None:
    model.temperature = 100.0


def _stop_dropping(model: nn.Module, stage: Stage) -> None:
    model.drop.p = 0.0


def _evaluate(model: nn.Module, stage: Stage) -> None:
    model.eval()


def _freeze_dropout(model: nn.Module, stage: Stage) -> None:
    model.drop.eval()


def _replace(model: nn.Module, stage: Stage) -> None:
    model.body = nn.Identity()


@FRONTENDS
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_set_temperature, r"temperature of the model was 1.0 when it was cut, and is 100.0 now"),
        (_stop_dropping, r"drop.p of the model was 0.5 when it was cut, and is 0.0 now"),
        (
            _evaluate,
            r"the model was put into eval mode after the cut, and stage \d, .* stage.module.eval\(\)",
        ),
        (
            _freeze_dropout,
            r"drop was put into eval mode after .* call stage.module.drop.eval\(\) on each rank",
        ),
        (_replace, r"body of the model was replaced by a Identity after the cut"),
    ],
)
def test_a_change_of_the_model_that_its_stages_do_not_see_is_warned_of(
    change: Callable[[nn.Module, Stage], object], text: str, frontend: str
) -> None:
    with pytest.warns(UserWarning, match=text):
        first, second = _losses(change, frontend)
    assert first == second


def test_a_setting_that_becomes_a_tensor_is_warned_of_too() -> None:
    def weigh(model: nn.Module, stage: Stage) -> None:
        model.temperature = torch.tensor([1.0, 2.0, 3.0, 4.0])

    with pytest.warns(UserWarning, match=r"temperature of the model was 1.0 .* and is tensor\("):
        _losses(weigh, "modules")


def _weigh_both(model: nn.Module, stage: Stage) -> None:
    model.temperature = torch.tensor([1.0, 2.0, 3.0, 4.0])
    stage.module.temperature = torch.tensor([1.0, 2.0, 3.0, 4.0])


class Counts(Warm):
    def __init__(self) -> None:
        super().__init__()
        self.width = 0

    def forward(self, x: Tensor) -> Tensor:
        self.width = len(x)
        return super().forward(x)


def _call_beside(model: nn.Module, stage: Stage) -> None:
    model(torch.randn(3, 4))


class NamedAsAGraph(Warm):
    """Torch's graph modules have a ``meta`` and a ``shape_env`` of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.meta, self.shape_env = "a text", 3


def _nothing(model: nn.Module, stage: Stage) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "kind", "frontend"),
    [
        (_weigh_both, Warm, "modules"),
        (_call_beside, Counts, "modules"),
        (_nothing, NamedAsAGraph, "export"),
        (_nothing, NamedAsAGraph, "modules"),
    ],
)
def test_what_stages_have_as_well_or_by_themselves_is_no_cause_for_a_warning(
    change: Callable[[nn.Module, Stage], object], kind: type[nn.Module], frontend: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _losses(change, frontend, kind, prove=False)


def _set_part(model: nn.Module, stage: Stage) -> None:
    if stage.index == 0:
        stage.module.drop.p = 0.0


def _set_stage(model: nn.Module, stage: Stage) -> None:
    stage.module.temperature = 100.0


@pytest.mark.parametrize(("change", "name"), [(_set_part, "drop.p"), (_set_stage, "temperature")])
def test_a_setting_of_a_part_that_a_captured_stage_never_reads_is_refused(
    change: Callable[[nn.Module, Stage], object], name: str
) -> None:
    with pytest.raises(ExecutionError, match=rf"{name} of stage \d was set to .* frontend=\"modules\""):
        _losses(change, "export")


@pytest.mark.parametrize("change", [_set_part, _set_stage])
def test_the_settings_of_stages_that_run_the_models_own_code_hold(
    change: Callable[[nn.Module, Stage], object],
) -> None:
    first, second = _losses(change, "modules")
    assert first != second


def _evaluate_both(model: nn.Module, stage: Stage) -> None:
    model.eval()
    stage.module.eval()


@FRONTENDS
def test_stages_that_were_switched_too_are_no_cause_for_a_warning(frontend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _losses(_evaluate_both, frontend)


def test_a_model_that_was_set_like_its_stages_is_no_cause_either() -> None:
    def both(model: nn.Module, stage: Stage) -> None:
        model.temperature = stage.module.temperature = 100.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = _losses(both, "modules")
    assert first != second
