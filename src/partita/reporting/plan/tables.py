"""Tables for the terminal: the plan, and the losses of both sides."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from partita.errors import ReportError
from partita.reporting.drawing.fitting_table import FittingColumn, FittingTable
from partita.reporting.drawing.units import (
    format_bytes,
    format_count,
    format_loss,
    format_number,
    format_seconds,
)
from partita.reporting.plan.modules import without_common_path
from partita.reporting.plan.plan_report import PlannedStageRow
from partita.reporting.step.data import LossPoint, StageRow

__all__ = ["loss_table", "plan_table", "planned_table"]

_LEAST_MODULES = 16


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


def planned_table(rows: Sequence[PlannedStageRow]) -> FittingTable:
    """Make the table of a plan that need not have run: the first and the last modules of each stage, without
    the path that all of them have in common. Where there is little room, modules are folded and other columns
    left out.
    """
    around, modules = without_common_path([row.modules for row in rows])
    # Text: a name with brackets in it is no markup.
    ends = [Text(" ".join(names if len(names) < 3 else (names[0], "…", names[-1]))) for names in modules]
    sends = [format_bytes(row.send_bytes) if row.send_bytes else "none" for row in rows]
    columns = [
        FittingColumn("stage", [str(row.stage) for row in rows]),
        FittingColumn("rank", [str(row.rank) for row in rows], left_out=7),
        FittingColumn(
            f"modules in {around}" if around else "modules",
            ends,
            least_width=_LEAST_MODULES,
            justify="left",
        ),
        FittingColumn("F", [format_seconds(row.forward_s) for row in rows], left_out=6),
        FittingColumn("B", [format_seconds(row.backward_s) for row in rows], left_out=5),
        FittingColumn("parameters", [format_bytes(row.parameter_bytes) for row in rows], left_out=3),
        FittingColumn("kept", [format_bytes(row.kept_bytes) for row in rows], left_out=4),
        FittingColumn("sends", sends, left_out=1),
    ]
    if any(row.recomputed for row in rows):
        again = [row.recomputed for row in rows]
        columns.append(FittingColumn("computed again", again, left_out=2, justify="left"))
    return FittingTable("Plan", columns)


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
