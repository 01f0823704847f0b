"""The benchmark of makespans runs; how fast, nobody asserts."""

from __future__ import annotations

import io
import json
from pathlib import Path

from benchmarks.pipeline_makespan import main
from rich.console import Console


def test_the_quick_mode_runs_real_processes_and_writes_json(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    (row,) = main(quick=True, json_path=tmp_path / "makespan.json", console=console)
    assert row.simulated_s > 0.002 * 3 * 2 * 4  # two stages a rank, four microbatches, F, I and W
    assert row.ours.rounds == 1
    assert row.theirs is not None
    assert row.theirs_failed == ""
    assert len(json.loads((tmp_path / "makespan.json").read_text())["rows"]) == 1
    assert "here / simulated" in console.file.getvalue()  # type: ignore[attr-defined]
