"""The benchmark of snapshots runs; how fast, nobody asserts."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.snapshot_overhead import main
from rich.console import Console


def test_the_quick_mode_measures_both_ways_and_writes_json(tmp_path: Path) -> None:
    rows = main(quick=True, json_path=tmp_path / "snapshots.json", console=Console(quiet=True))
    assert [row.way for row in rows] == ["Snapshots", "save_checkpoint"]
    assert json.loads((tmp_path / "snapshots.json").read_text())["benchmark"] == "snapshot_overhead"
