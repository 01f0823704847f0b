"""The benchmark of the splitter runs; how fast, nobody asserts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from benchmarks.splitter import _CASES, Case, Memory, Row, Slope, main, measure
from benchmarks.subjects import SHAPES, assignment
from rich.console import Console

import partita


@pytest.mark.dear
def test_the_quick_mode_measures_its_cases_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every subject collects garbage first, which is slow in a process as full as a test session's.
    monkeypatch.setattr("benchmarks.splitter._CASES", _CASES[::3])
    console = Console(file=io.StringIO(), width=120)
    results = main(quick=True, json_path=tmp_path / "splitter.json", console=console)
    assert {type(result) for result in results} == {Row, Slope, Memory}
    assert len(json.loads((tmp_path / "splitter.json").read_text())["rows"]) == len(results)
    assert "torch / split" in console.file.getvalue()  # type: ignore[attr-defined]


def test_torch_is_left_out_above_the_limit_of_a_case() -> None:
    row = measure(Case("inputs", 4, keep_original_order=True, torch_up_to=10), nodes=20, pieces=4, rounds=1)
    assert row.gain is None
    assert "torch" not in row.seconds


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_graphs_that_are_cut_are_cut_right(shape: str) -> None:
    gm = SHAPES[shape](60, 4)
    inputs = tuple(torch.ones(1, 2, 4) for node in gm.graph.nodes if node.op == "placeholder")
    cut = partita.split(gm, assignment(gm, 4))
    assert len(cut.pieces) == 4
    partita.verify(cut, gm, inputs).check()
