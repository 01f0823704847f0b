"""The benchmark of the runtime's overhead runs; how fast, nobody asserts."""

from __future__ import annotations

import io
import json
from pathlib import Path

from benchmarks.pipeline_overhead import main
from rich.console import Console


def test_the_quick_mode_measures_both_sides_and_writes_json(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    rows = main(quick=True, json_path=tmp_path / "overhead.json", console=console)
    assert [row.schedule for row in rows] == ["1F1B", "ZBVZeroBubble"] * 2
    assert [row.theirs_us is None for row in rows] == [False, False, False, True]
    # F and B of each stage; both ends of three links, both ways
    assert rows[0].actions == 4 * 8 * 2 + 6 * 8 * 2
    assert len(json.loads((tmp_path / "overhead.json").read_text())["rows"]) == len(rows)
    assert "torch / here" in console.file.getvalue()  # type: ignore[attr-defined]
