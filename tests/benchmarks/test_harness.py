"""The measuring itself."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import pytest
from benchmarks.harness import Ratio, environment, in_turn, progress_bar, ratio, slope, write_json
from rich.console import Console


def test_subjects_run_in_turn_and_the_warm_up_is_not_counted() -> None:
    calls: list[str] = []
    ticks = itertools.count()
    seconds = in_turn(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        rounds=2,
        clock=lambda: float(next(ticks)),
    )
    assert calls == ["a", "b"] * 3
    assert seconds == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds is 0; give at least 1"):
        in_turn({}, rounds=0)


def test_a_bar_tells_what_is_done_on_a_terminal_and_nothing_elsewhere() -> None:
    for terminal in (True, False):
        written = io.StringIO()
        console = Console(file=written, width=100, force_terminal=terminal)
        with progress_bar(console, "a model", ["compiling", "round 0"]) as done:
            done()
            done()
        assert ("a model: compiling" in written.getvalue()) == terminal
        assert ("2/2" in written.getvalue()) == terminal
        assert bool(written.getvalue()) == terminal


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert ratio([2.0, 9.0, 3.0], [1.0, 1.0, 1.0]) == Ratio(3.0, 2.0, 9.0, 3)


def test_a_quadratic_grows_with_slope_two() -> None:
    assert slope([1, 2, 4, 8], [1.0, 4.0, 16.0, 64.0]) == pytest.approx(2.0)


def test_figures_are_written_with_what_they_depend_on(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "figures.json"
    write_json(path, "splitter", [Ratio(1.0, 1.0, 1.0, 5)])
    content = json.loads(path.read_text())
    assert content["rows"] == [{"median": 1.0, "low": 1.0, "high": 1.0, "rounds": 5}]
    assert content["environment"].keys() == environment().keys() >= {"torch", "cores", "python"}
