"""The demo from start to end under each schedule that trains, with uneven numbers of stages too."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from partita.demo.run import run_demo
from partita.demo.settings import DemoSettings, TransformerConfig
from partita.planning import get_schedule
from partita.planning.generators.registry import schedule_names

TINY = TransformerConfig(width=32, heads=2, layers=2, context=16)
SCHEDULES = [(name, None) for name in schedule_names() if get_schedule(name).trains] + [
    ("GPipe", 3),
    ("1F1B", 5),
]

pytestmark = [pytest.mark.slow, pytest.mark.dear]


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
def test_the_cut_model_trains_bit_for_bit_like_the_uncut_one(
    schedule: str, stages: int | None, tmp_path: Path
) -> None:
    settings = DemoSettings(
        steps=2, stages=stages, schedule=schedule, microbatches=4, microbatch=2, validate_every=2, model=TINY
    )
    result = run_demo(settings, tmp_path / "out", Console(file=io.StringIO(), width=120))
    assert result.comparison.bitwise
