"""A table for the terminal that leaves out columns where there is no room, and cuts no cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["FittingColumn", "FittingTable"]


@dataclass(frozen=True, slots=True)
class FittingColumn:
    """A column, and how much it is needed.

    Args:
        name: its heading.
        cells: one a row.
        left_out: which column gives way first: those with the smallest number; None stays whatever the width.
        least_width: folded to no less than that; None where it is not folded as long as others can give way.
        justify: "left" or "right".
    """

    name: str
    cells: Sequence[str | Text]
    left_out: int | None = None
    least_width: int | None = None
    justify: str = "right"


class FittingTable:
    """Columns side by side; the least needed are left out until the others fit, and named below.

    Args:
        title: above the table.
        columns: in order, all with as many cells.
        row_styles: one a row; empty for none.
        caption: below the table.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[FittingColumn],
        *,
        row_styles: Sequence[str] = (),
        caption: str = "",
    ) -> None:
        self.title = title
        self.columns = tuple(columns)
        self.row_styles = tuple(row_styles)
        self.caption = caption

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render what there is room for."""
        shown = list(self.columns)
        ordered = [column for column in self.columns if column.left_out is not None]
        ordered.sort(key=lambda column: column.left_out or 0)
        for column in ordered:
            if _width(shown) <= options.max_width:
                break
            shown.remove(column)
        folded = _width(shown) > options.max_width
        left_out = [column.name for column in self.columns if column not in shown]
        yield self._table(shown, left_out, folded=folded)

    def _table(self, columns: Sequence[FittingColumn], left_out: Sequence[str], *, folded: bool) -> Table:
        table = Table(title=self.title, title_justify="left", caption_justify="left")
        for column in columns:
            can_fold = folded or column.least_width is not None
            table.add_column(
                column.name,
                justify="left" if column.justify == "left" else "right",
                no_wrap=not can_fold,
                overflow="fold",
                min_width=None if folded else _least_width(column),
            )
        for number, row in enumerate(zip(*(column.cells for column in columns), strict=True)):
            table.add_row(*row, style=self.row_styles[number] if self.row_styles else None)
        lines = [self.caption, f"no room for: {', '.join(left_out)}" if left_out else ""]
        table.caption = "\n".join(line for line in lines if line) or None
        return table


def _width(columns: Sequence[FittingColumn]) -> int:
    """The least width of a table of these columns: two spaces and a line for each, and a line."""
    return sum(3 + _least_width(column) for column in columns) + 1


def _least_width(column: FittingColumn) -> int:
    lines = (str(cell) for cell in (column.name, *column.cells))
    whole = max(cell_len(line) for line in lines)
    return whole if column.least_width is None else min(whole, column.least_width)
