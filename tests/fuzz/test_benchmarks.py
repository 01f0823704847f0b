"""Benchmarks that start processes of their own run from start to end; how fast, nobody asserts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from benchmarks.ddp_overlap import WAYS
from benchmarks.ddp_worker import tasks
from rich.console import Console

from benchmarks import (
    ddp_compile_time,
    ddp_network,
    ddp_overlap,
    fsdp_overlap,
    fsdp_ways,
    generation,
    pipeline_makespan,
    pipeline_memory,
    prediction,
)
from partita.errors import UsageError

pytestmark = [pytest.mark.slow, pytest.mark.dear]


@pytest.fixture
def _hosts() -> None:
    """Skip where this user may not make network namespaces."""
    try:
        with ddp_network.hosts(2):
            pass
    except UsageError as error:
        pytest.skip(str(error))


def rows_of(path: Path) -> int:
    return len(json.loads(path.read_text())["rows"])


@pytest.mark.usefixtures("_hosts")
def test_ddp_overlap_says_how_far_it_is(tmp_path: Path) -> None:
    written = io.StringIO()
    console = Console(file=written, width=200, force_terminal=True)
    rows = ddp_overlap.main(quick=True, json_path=tmp_path / "rows.json", console=console)
    assert [row.way for row in rows] == list(WAYS)
    assert [row.way for row in rows if row.problem] == ["compiled autograd"]
    assert "not compatible with C++ DDP Reducer" in written.getvalue()
    assert rows_of(tmp_path / "rows.json") == len(rows)
    assert "tiny on 2 hosts: compiling" in written.getvalue()
    number = len(tasks({"cells": {"1": list(WAYS)}, "rounds": 1}))
    assert f"{number}/{number}" in written.getvalue()


@pytest.mark.usefixtures("_hosts")
def test_fsdp_overlap_runs_every_way(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    rows = fsdp_overlap.main(quick=True, json_path=tmp_path / "rows.json", console=console)
    assert [(row.way, row.problem) for row in rows] == [(way, "") for way in fsdp_ways.WAYS]
    assert all(row.step_s and row.network_s > 0.0 for row in rows)
    assert rows_of(tmp_path / "rows.json") == len(rows)
    assert "exposed / network" in console.file.getvalue()  # type: ignore[attr-defined]


def test_ddp_compile_time() -> None:
    rows = ddp_compile_time.main(quick=True, console=Console(file=io.StringIO()))
    assert [row.way for row in rows] == list(ddp_compile_time.WAYS)


def test_makespans(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    rows = pipeline_makespan.main(quick=True, json_path=tmp_path / "rows.json", console=console)
    assert [(row.uneven, row.compiled) for row in rows] == [(False, None), (True, None), (False, "aot_eager")]
    for row in rows:
        assert row.simulated_s > 0.002 * 3 * 2 * 4  # two stages a rank, four microbatches, F, I and W
        assert row.ours.rounds == 1
        assert (row.theirs is None) is bool(row.theirs_failed)
    assert rows[0].theirs is not None  # torch refuses compiled stages
    assert rows_of(tmp_path / "rows.json") == len(rows)
    assert "here / simulated" in console.file.getvalue()  # type: ignore[attr-defined]


def test_memory_of_each_rank(tmp_path: Path) -> None:
    rows = pipeline_memory.main(quick=True, json_path=tmp_path / "rows.json")
    assert [row.rank for row in rows] == [0, 1]
    for row in rows:
        # two layers of 64, their gradients and two averages; GPipe keeps all 8 microbatches
        assert row.needed > 4 * 2 * 64 * 65 * 4
        assert 0 < row.activations < row.needed
        assert row.peak >= 0
    assert rows_of(tmp_path / "rows.json") == 2


def test_predictions(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    row, asleep = prediction.main(quick=True, json_path=tmp_path / "rows.json", console=console)
    assert isinstance(row, prediction.Row)
    assert isinstance(asleep, prediction.SleepingRow)
    assert row.predicted_s > 0.0
    assert asleep.predicted_s >= asleep.nominal_s
    assert row.step.rounds == 1
    assert len(row.predicted_bytes) == len(row.live_bytes) == 2
    assert all(size > 0 for size in (*row.predicted_bytes, *row.live_bytes))
    assert rows_of(tmp_path / "rows.json") == 2
    assert "step / predicted" in console.file.getvalue()  # type: ignore[attr-defined]


def test_generation(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    console = Console(file=io.StringIO(), width=140)
    rows = generation.main(quick=True, json_path=tmp_path / "generation.json", console=console)
    assert [row.way for row in rows if row.case == "sleeps"] == [
        "uncut, with a cache",
        "uncut, without a cache",
        "stages, 1 in flight",
        "stages, 2 in flight",
        "stages, 4 in flight",
    ]
    assert all(row.tokens_per_second > 0 for row in rows)
    assert rows_of(tmp_path / "generation.json") == 10
    assert "tokens a second" in console.file.getvalue()  # type: ignore[attr-defined]
