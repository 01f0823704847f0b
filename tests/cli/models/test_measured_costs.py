"""The costs of a model that was named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partita.cli.models import measured_costs
from partita.cli.models.measured_costs import measure_costs
from partita.cli.models.model_source import ModelSource
from partita.cli.models.user_file import Built
from partita.errors import InfeasiblePlan, UsageError
from partita.pipelining import measure_units
from partita.planning import CostModel, Unit, get_device


@pytest.mark.parametrize(("ranks", "given", "threads"), [(2, None, 1), (2, "2", 2), (1, None, 2)])
def test_ranks_that_share_this_machine_are_measured_with_a_thread_each(
    monkeypatch: pytest.MonkeyPatch, ranks: int, given: str | None, threads: int
) -> None:
    measured: list[int] = []

    def count(*_: object, **__: object) -> CostModel:
        measured.append(torch.get_num_threads())
        return CostModel((Unit("linear", 1.0, 2.0, parameters=6),), ())

    monkeypatch.setattr(measured_costs, "measure_units", count)
    monkeypatch.setattr(ModelSource, "build", lambda *_: Built(torch.nn.Linear(2, 2), (torch.ones(1, 2),)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure_costs(ModelSource("x"), None, ranks, None, lambda _: None)
        assert (measured, torch.get_num_threads()) == ([threads], 2)
    finally:
        torch.set_num_threads(before)


def test_a_model_without_values_is_not_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan had the seconds of no particular device, as if they had been measured."""
    with torch.device("meta"):
        built = Built(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    monkeypatch.setattr(ModelSource, "build", lambda *_: built)
    with pytest.raises(UsageError, match=r"^x can't be measured here: .* with values, or give --devices$"):
        measure_costs(ModelSource("x"), None, 2, None, lambda _: None)


class TwoTowers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.vision = torch.nn.Linear(2, 2), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, pixels: torch.Tensor | None = None) -> torch.Tensor:
        return self.text(x) if pixels is None else self.text(x) + self.vision(pixels)


def test_parameters_that_the_example_does_not_use_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vision language model given tokens alone was planned without its vision tower, and without a word."""

    def told(**inputs: torch.Tensor) -> str:
        with torch.device("meta"):
            built = Built(TwoTowers(), (), inputs)
        monkeypatch.setattr(ModelSource, "build", lambda *_: built)
        measure_costs(ModelSource("x"), get_device("H100"), 1, None, lambda _: None)
        return capsys.readouterr().err

    x, pixels = (torch.ones(1, size, device="meta") for size in (2, 3))
    assert "8 of 14 parameters are not in the plan: forward does not use them with x." in told(x=x)
    assert told(x=x, pixels=pixels) == ""


def test_what_costs_are_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        built = Built(TwoTowers().to(torch.bfloat16), (torch.ones(1, 2, dtype=torch.bfloat16),), {})
    monkeypatch.setattr(ModelSource, "build", lambda *_: built)
    measured = measure_costs(ModelSource("x"), get_device("H100"), 1, None, lambda _: None)
    assert (measured.dtype, measured.microbatch) == ("bfloat16", "argument 0 bfloat16[1, 2]")


def test_units_are_small_enough_for_a_stage_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--stages auto`` units were whole blocks: a Llama of two layers was refused on 16 devices, and
    with ``--stages 16`` it was planned.
    """
    with torch.device("meta"):
        layers = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()) for _ in range(8)]
        built = Built(torch.nn.Sequential(*layers), (torch.ones(1, 2),))
    monkeypatch.setattr(ModelSource, "build", lambda *_: built)
    wanted: list[int | None] = []

    def count(*args: Any, stages: int | None = None, **options: Any) -> CostModel:
        wanted.append(stages)
        return measure_units(*args, stages=stages, **options)

    monkeypatch.setattr(measured_costs, "measure_units", count)
    for stages in (None, 4):
        measure_costs(ModelSource("x"), get_device("H100"), 8, stages, lambda _: None)
    assert wanted == [8, 4]
    with pytest.raises(
        InfeasiblePlan,
        match=r"^99 ranks take 99 stages at least, but this model can be cut into at most 16 \(16 units\): ",
    ):
        measure_costs(ModelSource("x"), get_device("H100"), 99, None, lambda _: None)
