"""The benchmark of generation runs; how fast, nobody asserts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from benchmarks.generation import main
from rich.console import Console

pytest.importorskip("transformers")


def test_the_quick_mode_runs_real_processes_and_writes_json(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=140)
    rows = main(quick=True, json_path=tmp_path / "generation.json", console=console)
    assert [row.way for row in rows if row.case == "sleeps"] == [
        "uncut, with a cache",
        "uncut, without a cache",
        "stages, 1 in flight",
        "stages, 2 in flight",
        "stages, 4 in flight",
    ]
    assert all(row.tokens_per_second > 0 for row in rows)
    assert len(json.loads((tmp_path / "generation.json").read_text())["rows"]) == 10
    assert "tokens a second" in console.file.getvalue()  # type: ignore[attr-defined]
