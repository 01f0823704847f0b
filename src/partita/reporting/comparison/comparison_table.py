"""A comparison as a table for the terminal: a column a run."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from partita.reporting.comparison.compared import Quantity, RunComparison
from partita.reporting.drawing.units import (
    format_bytes,
    format_loss,
    format_number,
    format_seconds,
    format_share,
)

__all__ = ["comparison_table", "quantity_text"]

_FORMATS = {
    "seconds": format_seconds,
    "share": format_share,
    "bytes": format_bytes,
    "rate": format_number,
    "loss": format_loss,
    "count": lambda value: str(int(value)),
}


def comparison_table(comparison: RunComparison) -> Table:
    """Make a table with a row a quantity. The best of a row are green and bold."""
    table = Table()
    table.add_column("")
    for run in comparison.runs:
        table.add_column(Text(run.name), justify="right", overflow="fold")
    table.add_row("Times", *(run.kind for run in comparison.runs))
    table.add_row("Schedule", *(Text(run.schedule or "–") for run in comparison.runs))
    for line in comparison.quantities:
        best = line.best
        cells = [
            Text(quantity_text(line, place), "bold green" if place in best else "")
            for place in range(len(comparison.runs))
        ]
        table.add_row(line.name, *cells)
    return table


def quantity_text(line: Quantity, place: int) -> str:
    """One value of a row; a dash where the run does not have it."""
    value = line.values[place]
    return "–" if value is None else _FORMATS[line.unit](value)
