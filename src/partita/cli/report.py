"""``partita report``: the page of a run that was kept, or several runs and plans side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from partita.cli.output.output_files import check_outputs, write_outputs
from partita.cli.output.stdout import drawing_width, stdout_console
from partita.errors import PlanError, ReportError, UsageError
from partita.planning import Plan
from partita.reporting import (
    ComparedRun,
    RunComparison,
    RunReport,
    chrome_trace,
    compared_plan,
    compared_report,
    comparison_table,
    render_comparison_html,
    render_html,
    report_from_json,
    report_text,
    report_to_json,
)

__all__ = ["report"]


def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="report.json of a run, or plan.json; several are compared. NAME=FILE names one."),
    ],
    html: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Of one run: write a Chrome trace of its step here, for Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show a run that was kept: why its step took longer than simulated, memory, speed; or compare several.

    \b
    partita report out/demo/report.json --html report.html --trace trace.json
    partita report gpipe=a/report.json 1f1b=b/report.json --html comparison.html
    partita report plan.json other_plan.json  # plans are simulated
    """
    check_outputs({"--html": html, "--trace": trace})
    named = [_name_and_path(file) for file in files]
    if len(named) == 1 and not _is_plan(named[0][1]):
        _show_one(_read_report(named[0][1]), html, trace, as_json)
        return
    if trace is not None:
        raise UsageError("--trace is of one run: give one report.json, or leave it out")
    if len(named) == 1:
        raise UsageError(
            f"{named[0][1]} is a plan: give two or more to compare them, or simulate one with `partita "
            f"simulate {named[0][1]}`"
        )
    comparison = RunComparison("Runs compared", tuple(_compared(*item) for item in _distinct(named)))
    written = write_outputs([(html, lambda: render_comparison_html(comparison))])
    if as_json:
        print(json.dumps(comparison.as_dict(), indent=2))
    else:
        stdout_console().print(comparison_table(comparison))
    _say_written(written, as_json)


def _show_one(run: RunReport, html: Path | None, trace: Path | None, as_json: bool) -> None:
    timelines = [run.measured, run.simulated]
    written = write_outputs([(html, lambda: render_html(run)), (trace, lambda: chrome_trace(timelines))])
    if as_json:
        print(report_to_json(run, indent=2))
    else:
        console = stdout_console()
        for part in report_text(run, drawing_width(console)):
            console.print(part)
    _say_written(written, as_json)


def _say_written(written: tuple[Path, ...], as_json: bool) -> None:
    for path in written:
        print(f"wrote {path}", file=sys.stderr if as_json else sys.stdout)


def _name_and_path(argument: Path) -> tuple[str, Path]:
    name, equals, path = str(argument).partition("=")
    if equals and not argument.exists():
        return name, Path(path)
    return "", argument


def _distinct(named: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Names for those that were given none: the file's, or so much of its path as tells it from others."""
    paths = [path for _, path in named]
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" if path.parent.name else path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    distinct = [(label or name, path) for (label, path), name in zip(named, names, strict=True)]
    taken: dict[str, Path] = {}
    for name, path in distinct:
        if name in taken:
            raise UsageError(f"{taken[name]} and {path} are both called {name!r}: give one as NAME={path}")
        taken[name] = path
    return distinct


def _compared(name: str, path: Path) -> ComparedRun:
    if not _is_plan(path):
        return compared_report(_read_report(path), name)
    try:
        return compared_plan(Plan.from_json(_text(path)), name)
    except PlanError as error:
        raise UsageError(f"{path} can't be simulated: {error}") from error


def _read_report(path: Path) -> RunReport:
    try:
        return report_from_json(_text(path))
    except ReportError as error:
        raise UsageError(f"{path}: {error}") from error


def _is_plan(path: Path) -> bool:
    """Whether a file says of itself that it is a plan; what is neither is refused as a report."""
    try:
        content: Any = json.loads(_text(path))
    except ValueError:
        return False
    return isinstance(content, dict) and str(content.get("format", "")).startswith("partita.plan")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{path} can't be read ({reason}): give report.json or plan.json") from error
