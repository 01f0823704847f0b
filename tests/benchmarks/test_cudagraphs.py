"""The benchmark of the region finder runs; how fast, nobody asserts."""

from __future__ import annotations

import io
import json
from pathlib import Path

from benchmarks.cudagraphs import Growth, Row, alternating, main
from rich.console import Console

from partita.cudagraphs import find_regions


def test_the_quick_mode_measures_every_size_and_writes_json(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    results = main(quick=True, json_path=tmp_path / "cudagraphs.json", console=console)
    assert {type(result) for result in results} == {Row, Growth}
    assert len(json.loads((tmp_path / "cudagraphs.json").read_text())["rows"]) == len(results)
    assert "torch / partition" in console.file.getvalue()  # type: ignore[attr-defined]


def test_every_tenth_node_divides() -> None:
    assert len(find_regions(alternating(50)).regions) == 5
