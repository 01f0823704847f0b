"""The demo from start to end, on a model small enough for a test."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from partita.demo.run import run_demo
from partita.demo.settings import DemoSettings, TransformerConfig
from partita.demo.training import build_model, example
from partita.errors import ScheduleError, UsageError
from partita.pipelining import measure_units
from partita.planning import Plan
from partita.reporting import report_from_json, step_differences

TINY = TransformerConfig(width=32, heads=2, layers=2, context=16)


def test_too_many_stages_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--stages is 9: the demo's model can be cut into at most 8"):
        run_demo(DemoSettings(stages=9, model=TINY), tmp_path, Console(file=io.StringIO()))


def test_the_most_stages_are_the_units_of_the_model() -> None:
    settings = DemoSettings(model=TINY)
    costs = measure_units(build_model(settings), (example(settings),))
    assert len(costs.units) == TINY.most_stages


def test_an_unwritable_folder_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't be written to"):
        run_demo(DemoSettings(), tmp_path / "file" / "out", Console(file=io.StringIO()))


def test_an_unknown_schedule_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"choose one of .*GPipe, 1F1B"):
        run_demo(DemoSettings(schedule="2F2B"), tmp_path, Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("schedule", "stages", "processes"),
    [
        ("1F1B", 2, 2),
        ("ZBVZeroBubble", 4, 2),
        ("DualPipeV", 4, 2),
        ("Interleaved1F1B", 4, 2),
    ],
)
def test_each_schedule_has_the_stages_that_it_was_thought_out_for(
    schedule: str, stages: int, processes: int
) -> None:
    settings = DemoSettings(schedule=schedule)
    settings.check_schedule()
    assert (settings.number_of_stages, settings.processes) == (stages, processes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "ForwardOnly"}, "--schedule is ForwardOnly, which has no backward pass"),
        (
            {"schedule": "DualPipeV", "stages": 3},
            "--stages is 3, and DualPipeV has 2 on each process: give 4",
        ),
    ],
)
def test_what_a_schedule_can_not_do_is_refused_before_training(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DemoSettings(**options).check_schedule()


@pytest.mark.dear
def test_the_cut_model_trains_bit_for_bit_like_the_uncut_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.demo.launch._START_METHOD", "forkserver")  # has the imports done
    text = io.StringIO()
    settings = DemoSettings(
        steps=3, schedule="zbvzerobubble", microbatches=4, microbatch=2, validate_every=2, model=TINY
    )
    result = run_demo(settings, tmp_path / "out", Console(file=text, width=120))
    assert result.comparison.bitwise
    assert result.comparison.largest == 0.0
    assert [point.step for point in result.losses] == [0, 1, 2]
    assert all(point.pipelined == point.reference for point in result.losses)
    assert len({point.reference for point in result.losses}) == 3
    assert "in 4 (ZBVZeroBubble, 4 microbatches" in text.getvalue()
    assert "largest parameter difference: 0.0" in text.getvalue()
    assert len(Plan.from_json((tmp_path / "out" / "plan.json").read_text()).stages) == 4
    assert json.loads((tmp_path / "out" / "trace.json").read_text())
    assert "<html" in (tmp_path / "out" / "report.html").read_text()
    report = report_from_json((tmp_path / "out" / "report.json").read_text())
    assert len(report.stages) == 4
    assert report.measured.ranks == (0, 1)
    assert step_differences(report.measured, report.simulated) is not None


@pytest.mark.parametrize("name", ["steps", "stages", "microbatches", "microbatch"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"--{name} is 0: give 1 or more"):
        DemoSettings(**{name: 0})
