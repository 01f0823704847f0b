"""Tables for the terminal: the plan, and the losses of both sides."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from partita.errors import ReportError
from partita.reporting.drawing.units import (
    format_bytes,
    format_count,
    format_loss,
    format_number,
    format_seconds,
)
from partita.reporting.plan.plan_report import PlannedStageRow
from partita.reporting.step.data import LossPoint, StageRow

__all__ = ["loss_table", "plan_table", "planned_table"]


def plan_table(rows: Sequence[StageRow]) -> Table:
    """Make the plan's table: a row a stage, and totals. Times and sends are those of one microbatch."""
    table = Table(title="Plan", title_justify="left", show_footer=len(rows) > 1)
    parameters = sum(row.parameters for row in rows)
    size = sum(row.parameter_bytes for row in rows)
    table.add_column("stage", justify="right", footer="all")
    table.add_column("rank", justify="right")
    table.add_column("modules", overflow="fold", ratio=1)
    table.add_column(
        "parameters", justify="right", footer=f"{format_count(parameters)} ({format_bytes(size)})"
    )
    table.add_column("forward", justify="right", footer=format_seconds(sum(row.forward_s for row in rows)))
    table.add_column("backward", justify="right", footer=format_seconds(sum(row.backward_s for row in rows)))
    table.add_column("sends", justify="right", footer=format_bytes(sum(row.send_bytes for row in rows)))
    for row in rows:
        table.add_row(
            str(row.stage),
            str(row.rank),
            Text(", ".join(row.modules)),  # Text: a name with brackets in it is no markup
            f"{format_count(row.parameters)} ({format_bytes(row.parameter_bytes)})",
            format_seconds(row.forward_s),
            format_seconds(row.backward_s),
            format_bytes(row.send_bytes) if row.send_bytes else "none",
        )
    return table


def planned_table(rows: Sequence[PlannedStageRow]) -> Table:
    """Make the table of a plan that need not have run: a line a stage, however many modules it holds."""
    table = Table(title="Plan", title_justify="left")
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("modules")  # the only one that gives way; its cells end in an ellipsis then
    for name in ("F", "B", "parameters", "kept", "sends"):
        table.add_column(name, justify="right", no_wrap=True)
    has_recomputed = any(row.recomputed for row in rows)
    if has_recomputed:
        table.add_column("computed again", no_wrap=True)
    for row in rows:
        # Text: a name with brackets in it is no markup.
        ends = row.modules if len(row.modules) < 3 else (row.modules[0], "…", row.modules[-1])
        cells: list[str | Text] = [
            str(row.stage),
            str(row.rank),
            Text(" ".join(ends), no_wrap=True, overflow="ellipsis"),
            format_seconds(row.forward_s),
            format_seconds(row.backward_s),
            format_bytes(row.parameter_bytes),
            format_bytes(row.kept_bytes),
            format_bytes(row.send_bytes) if row.send_bytes else "none",
        ]
        table.add_row(*cells, *([row.recomputed] if has_recomputed else []))
    return table


def loss_table(points: Sequence[LossPoint], last: int | None = None) -> Table:
    """Make a table of both sides' losses, step by step; only the last `last` steps where that is given.

    Raises:
        ReportError: `last` is negative.
    """
    if last is not None and last < 0:
        raise ReportError(f"last is {last}; give how many steps to show, 0 or more.")
    shown = points if last is None else points[max(0, len(points) - last) :]
    table = Table(title="Losses", title_justify="left")
    for name in ("step", "pipelined", "uncut", "difference"):
        table.add_column(name, justify="right")
    for point in shown:
        table.add_row(
            str(point.step),
            format_loss(point.pipelined),
            format_loss(point.reference),
            format_number(float(point.difference)),
        )
    return table
