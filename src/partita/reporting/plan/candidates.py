"""What was compared: schedules or plans with what a simulated step of each takes, as rows and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from partita.reporting.drawing.checks import require_quantity
from partita.reporting.drawing.units import format_bytes, format_seconds, format_share

__all__ = ["CandidateRow", "MemoryUnit", "candidate_table", "format_memory"]

MemoryUnit = Literal["bytes", "microbatches"]
"""Where nobody said how large activations are, memory is counted in microbatches of a rank's layers."""


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One schedule or plan that was simulated.

    Args:
        name: of the schedule.
        stages: how many.
        makespan_s: seconds of a step.
        bubble: share of the ranks' time in it without computation.
        span_s: the longest span of a single rank, from its first action to its last.
        span_bubble: the bubble with that in place of the makespan.
        peak: the most that a rank holds, in the table's unit.
        fits: whether that is within the limit.
        note: what else there is to say, such as what is computed again; may be empty.

    Raises:
        ReportError: a quantity is negative or not finite.
    """

    name: str
    stages: int
    makespan_s: float
    bubble: float
    span_s: float
    span_bubble: float
    peak: float
    fits: bool = True
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("stages", "makespan_s", "span_s", "peak"):
            require_quantity("CandidateRow", name, getattr(self, name))


def candidate_table(
    rows: Sequence[CandidateRow],
    *,
    unit: MemoryUnit = "bytes",
    limit: float | None = None,
    title: str = "Schedules",
) -> Table:
    """Make a table with a row for each, in the order given. What is above `limit` is marked."""
    table = Table(title=title, title_justify="left")
    table.add_column("schedule", no_wrap=True)
    for name in ("stages", "step", "bubble", "span", "by span", "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    has_notes = any(row.note for row in rows)
    if has_notes:
        table.add_column("recomputed", justify="right", no_wrap=True)
    for row in rows:
        peak = format_memory(row.peak, unit)
        cells: list[str | Text] = [
            Text(row.name),
            str(row.stages),
            format_seconds(row.makespan_s),
            format_share(row.bubble),
            format_seconds(row.span_s),
            format_share(row.span_bubble),
            peak if row.fits else Text(f"{peak}, too much", "red"),
        ]
        if has_notes:
            cells.append(Text(row.note))
        table.add_row(*cells, style=None if row.fits else "dim")
    if limit is not None:
        table.caption, table.caption_justify = f"a rank may hold {format_memory(limit, unit)}", "left"
    return table


def format_memory(amount: float, unit: MemoryUnit) -> str:
    """Write an amount of memory in its unit.

    >>> format_memory(2**30, "bytes"), format_memory(4.5, "microbatches"), format_memory(5, "microbatches")
    ('1.00 GiB', '4.5 microbatches', '5 microbatches')
    """
    if unit == "bytes":
        return format_bytes(amount)
    return f"{round(amount, 2):,}".removesuffix(".0") + " microbatches"
