"""The benchmark of compiled stages runs; how fast, nobody asserts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.compiled_pipeline import ShareRow, main
from rich.console import Console


@pytest.mark.dear
def test_the_quick_mode_measures_stages_and_writes_json(tmp_path: Path) -> None:
    rows = main(quick=True, json_path=tmp_path / "compiled.json", console=Console(quiet=True))
    assert len(json.loads((tmp_path / "compiled.json").read_text())["rows"]) == len(rows) == 2
    for row in rows:
        assert isinstance(row, ShareRow)
        assert row.kept[0] <= row.kept[1]
