from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import planner


def test_it_compares_every_model_and_writes_json(tmp_path: Path) -> None:
    rows = planner.main(quick=True, json_path=tmp_path / "figures.json")
    assert [row.model for row in rows] == list(planner.MODELS)
    assert len(json.loads((tmp_path / "figures.json").read_text())["rows"]) == len(rows)


@pytest.mark.parametrize("model", planner.MODELS)
def test_no_rule_of_thumb_is_better_than_the_plan(model: str) -> None:
    row = planner.compare(model, 3, microbatches=6)
    assert row.planned_s <= row.best_rule_s * (1 + 1e-9)
    assert row.free_s <= row.planned_s * (1 + 1e-9)
