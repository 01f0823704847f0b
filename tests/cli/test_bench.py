"""``partita bench``."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackagePath
from pathlib import Path
from types import SimpleNamespace

import pytest

from partita.cli.bench import bench, benchmark_names, find_benchmarks
from partita.errors import UsageError

ROOT = Path(__file__).parents[2]


def test_names_are_listed_with_their_questions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    bench()
    assert re.search(r"^splitter +How long does a split take", capsys.readouterr().out, re.MULTILINE)


def test_helpers_of_the_benchmarks_are_no_benchmarks() -> None:
    names = benchmark_names(ROOT / "benchmarks")
    assert "splitter" in names
    assert not {"harness", "subjects", "__init__", "ddp-worker"} & names.keys()
    assert all(question.endswith("?") for question in names.values())


@pytest.mark.parametrize("written", ["pipeline-overhead", "pipeline_overhead"])
def test_a_name_is_written_with_dashes_or_underscores(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("benchmarks.pipeline_overhead.main", lambda **options: ran.append(options))
    bench(written, quick=True)
    assert ran == [{"quick": True, "json_path": None}]
    assert "pipeline-overhead" in benchmark_names(ROOT / "benchmarks")


def test_cells_are_chosen_where_a_benchmark_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def measured(*, quick: bool, json_path: Path | None, only: list[str]) -> None:
        ran.append(only)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("benchmarks.pipeline_overhead.main", measured)
    bench("pipeline-overhead", only=["ZBV"])
    assert ran == [["ZBV"]]
    with pytest.raises(UsageError, match="'splitter' has no cells to choose from: leave out --only"):
        bench("splitter", only=["*"])


def test_a_place_for_the_figures_that_can_not_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback after minutes of measuring."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("benchmarks.pipeline_overhead.main", lambda **options: pytest.fail("it measures"))
    with pytest.raises(UsageError, match=f"--json is {tmp_path}, a folder: give a file"):
        bench("pipeline-overhead", json_path=tmp_path)


def test_an_unknown_name_is_answered_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UsageError, match=r"no benchmark is called 'spliter'; there are: .*splitter"):
        bench("spliter")


def test_without_the_folder_the_message_says_where_benchmarks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.cli.bench.files", lambda _name: None)
    with pytest.raises(UsageError, match=r"there is no folder 'benchmarks' in .*: call this in a checkout"):
        find_benchmarks(tmp_path, tmp_path / "site-packages" / "partita" / "cli" / "bench.py")


def test_an_installed_package_brings_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "share" / "partita" / "benchmarks"
    folder.mkdir(parents=True)
    (folder / "harness.py").touch()
    installed = PackagePath("share/partita/benchmarks/harness.py")
    installed.dist = SimpleNamespace(locate_file=tmp_path.joinpath)  # type: ignore[assignment]
    monkeypatch.setattr("partita.cli.bench.files", lambda _name: [installed])
    assert find_benchmarks(tmp_path, tmp_path / "partita" / "cli" / "bench.py") == folder


def test_processes_that_a_benchmark_starts_find_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", "before")
    seen = []
    monkeypatch.setattr("benchmarks.splitter.main", lambda **_options: seen.append(os.environ["PYTHONPATH"]))
    bench("splitter")
    assert seen == [f"{ROOT}{os.pathsep}before"]
    assert os.environ["PYTHONPATH"] == "before"


def test_the_checkout_is_found_from_elsewhere(tmp_path: Path) -> None:
    assert find_benchmarks(tmp_path, ROOT / "src" / "partita" / "cli" / "bench.py") == ROOT / "benchmarks"
