"""What was compared: schedules or plans with what a simulated step of each takes, as rows and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from partita.reporting.drawing.checks import require_quantity
from partita.reporting.drawing.fitting_table import FittingColumn, FittingTable
from partita.reporting.drawing.units import format_bytes, format_seconds, format_share

__all__ = ["CandidateRow", "MemoryUnit", "candidate_table", "format_memory", "limit_words"]

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
    limits: Sequence[float | None] = (),
    title: str = "Schedules",
) -> FittingTable:
    """Make a table with a row for each, in the order given. What does not fit is marked, and `limits` says
    what each rank may hold. Where there is little room, columns are left out.
    """
    peaks = [format_memory(row.peak, unit) for row in rows]
    columns = [
        FittingColumn("schedule", [Text(row.name) for row in rows], justify="left"),
        FittingColumn("stages", [str(row.stages) for row in rows], left_out=4),
        FittingColumn("step", [format_seconds(row.makespan_s) for row in rows]),
        FittingColumn("bubble", [format_share(row.bubble) for row in rows], left_out=5),
        FittingColumn("span", [format_seconds(row.span_s) for row in rows], left_out=1),
        FittingColumn("by span", [format_share(row.span_bubble) for row in rows], left_out=2),
        FittingColumn(
            "peak memory",
            [
                peak if row.fits else Text(f"{peak}, too much", "red")
                for row, peak in zip(rows, peaks, strict=True)
            ],
            left_out=6,
        ),
    ]
    if any(row.note for row in rows):
        columns.append(FittingColumn("recomputed", [Text(row.note) for row in rows], left_out=3))
    styles = ["" if row.fits else "dim" for row in rows]
    return FittingTable(title, columns, row_styles=styles, caption=limit_words(limits, unit))


def limit_words(limits: Sequence[float | None], unit: MemoryUnit) -> str:
    """Say what a rank may hold; empty where there is no limit.

    >>> limit_words([4, 4], "microbatches"), limit_words([4, 8], "microbatches")
    ('a rank may hold 4 microbatches', 'a rank may hold 4 microbatches to 8 microbatches')
    """
    sizes = [limit for limit in limits if limit is not None]
    if not sizes:
        return ""
    words = f"a rank may hold {format_memory(min(sizes), unit)}"
    if len(sizes) < len(limits):
        return f"{words} or more"
    return words if min(sizes) == max(sizes) else f"{words} to {format_memory(max(sizes), unit)}"


def format_memory(amount: float, unit: MemoryUnit) -> str:
    """Write an amount of memory in its unit.

    >>> format_memory(2**30, "bytes"), format_memory(4.5, "microbatches"), format_memory(1, "microbatches")
    ('1.00 GiB', '4.5 microbatches', '1 microbatch')
    """
    if unit == "bytes":
        return format_bytes(amount)
    return f"{round(amount, 2):,}".removesuffix(".0") + (" microbatch" if amount == 1 else " microbatches")
