"""``partita report``: one run, and several side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.reporting.fake_report import fake_report
from typer.testing import CliRunner

from partita.cli.main import app
from partita.errors import UsageError
from partita.planning import CostModel, Unit, plan_stages
from partita.reporting import report_to_json


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, title in (("a", "first"), ("b", "second")):
        (tmp_path / name).mkdir()
        report = replace(fake_report(), title=title)
        (tmp_path / name / "report.json").write_text(report_to_json(report))
    costs = CostModel(tuple(Unit(name, 1.0, 2.0) for name in "ab"), crossing_bytes=(0,))
    (tmp_path / "plan.json").write_text(plan_stages(costs, 2, schedule="GPipe").to_json())
    return tmp_path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_one_run_is_shown_and_written(files: Path) -> None:
    page, trace = files / "page.html", files / "trace.json"
    text = run(files / "a" / "report.json", "--html", page, "--trace", trace)
    assert "The measured step is" in text
    assert "Why simulated and measured differ" in page.read_text()
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert "stage 1 forward, microbatch 3" in names


def test_runs_and_plans_are_compared_by_the_names_that_tell_them_apart(files: Path) -> None:
    page = files / "page.html"
    answer = json.loads(
        run(
            files / "a" / "report.json",
            files / "b" / "report.json",
            f"planned={files / 'plan.json'}",
            "--json",
            "--html",
            page,
        ).partition("\nwrote")[0]
    )
    assert [item["name"] for item in answer["runs"]] == ["a/report.json", "b/report.json", "planned"]
    assert [item["kind"] for item in answer["runs"]] == ["measured", "measured", "simulated"]
    assert "GPipe" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], r"missing.json can't be read \(No such file"),
        (
            ["plan.json"],
            "is a plan: give two or more to compare them, or simulate one with `partita simulate plan.json`",
        ),
        (["plan.json", "a/report.json", "--trace", "t.json"], "--trace is of one run"),
        (
            ["x=plan.json", "x=a/report.json"],
            "plan.json and a/report.json are both called 'x': give one as NAME=a/report.json",
        ),
        (["a"], r"can't be read \(Is a directory\)"),
        (["junk.json"], "This is no report that can be read"),
    ],
)
def test_what_can_not_be_used_is_refused(
    files: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(files)
    Path("junk.json").write_text("{}")
    with pytest.raises(UsageError, match=message):
        run(*arguments)
