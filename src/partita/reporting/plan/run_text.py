"""The report of a run for the terminal: what the page shows, in tables and drawings."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from partita.reporting.drawing.palette import kind_style
from partita.reporting.drawing.units import format_bytes, format_number, format_seconds
from partita.reporting.plan.tables import plan_table
from partita.reporting.step.data import RankMemory, RunReport
from partita.reporting.step.differences import (
    ActionRow,
    StepDifferences,
    differences_text,
    signed_seconds,
    step_differences,
)
from partita.reporting.step.text import timeline_drawing

__all__ = ["action_table", "memory_table", "rank_table", "report_text"]

_NARROWEST, _WIDEST = 20, 160


def report_text(report: RunReport, width: int = 100) -> list[RenderableType]:
    """Return the parts of a report in the order in which the page has them; those without data are left out.

    Args:
        report: of the run.
        width: characters of a line of the drawings.
    """
    parts: list[RenderableType] = [Text(report.title, "bold")]
    if report.subtitle:
        parts.append(Text(report.subtitle, "dim"))
    parts.append(_figures(report))
    if report.stages:
        parts.append(plan_table(report.stages))
    columns = min(_WIDEST, max(_NARROWEST, width))
    parts += [
        timeline_drawing(timeline, columns, legend=timeline is report.simulated, most_lanes=16)
        for timeline in (report.measured, report.simulated)
        if timeline.spans
    ]
    differences = step_differences(report.measured, report.simulated)
    if differences is not None:
        parts.append(Text(differences_text(differences, report.measured, report.simulated)))
        parts += [rank_table(differences), action_table(differences.actions)]
    if report.memory:
        parts.append(memory_table(report.memory))
    return parts


def rank_table(differences: StepDifferences) -> Table:
    """Make a table of where each rank's step went, simulated seconds in brackets."""
    table = Table(title="Each rank's step (simulated)", title_justify="left")
    table.add_column("rank")
    for name in ("computing", "waiting", "starting\nmessages", "Python"):
        table.add_column(name, justify="right")
    for use, imagined in zip(differences.measured, differences.simulated, strict=True):
        table.add_row(
            str(use.rank),
            f"{format_seconds(use.computing_s)} ({format_seconds(imagined.computing_s)})",
            f"{format_seconds(use.waiting_s)} ({format_seconds(imagined.waiting_s)})",
            format_seconds(use.messages_s),
            format_seconds(use.python_s),
        )
    return table


def action_table(rows: tuple[ActionRow, ...]) -> Table:
    """Make a table of each stage's passes, as means of a microbatch."""
    table = Table(title="Each kind of pass, means of a microbatch", title_justify="left")
    table.add_column("pass")
    for name in ("computing", "simulated", "waits\nbefore", "simulated", "Python,\nmessages", "longer\nby"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"stage {row.stage} {kind_style(row.kind).name}",
            format_seconds(row.computing_s),
            format_seconds(row.simulated_s),
            format_seconds(row.waiting_s),
            format_seconds(row.simulated_wait_s),
            format_seconds(row.python_s),
            signed_seconds(row.difference_s),
        )
    return table


def memory_table(rows: tuple[RankMemory, ...]) -> Table:
    """Make a table of the most memory that each rank held."""
    table = Table(title="Memory by rank", title_justify="left")
    for name in ("rank", "measured", "predicted"):
        table.add_column(name, justify="left" if name == "rank" else "right")
    for row in rows:
        table.add_row(str(row.rank), format_bytes(row.measured_bytes), format_bytes(row.predicted_bytes))
    return table


def _figures(report: RunReport) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for figure in report.figures:
        value = figure.value if isinstance(figure.value, str) else format_number(figure.value)
        table.add_row(figure.name, Text(f"{value} {figure.unit}".strip(), "bold"), Text(figure.note, "dim"))
    return table
