"""The pieces of a model in the terminal: a table, and a drawing of what goes from stage to stage.

::

    ●┌  stage 0   1.20 M  embed layers.0-2
    ││            8.00 KiB on, 8.00 KiB back
    ●│  stage 1   1.05 M  layers.3-5
    ││            8.00 KiB on, 8.00 KiB back
    ││            from stage 0: 2.00 KiB on, 2.00 KiB back
    ●└  stage 2   1.20 M  layers.6-7 head
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from partita.listing import first_few
from partita.reporting.drawing.units import format_bytes, format_count
from partita.reporting.split.split_report import CrossingRow, PieceRow, StagesReport

__all__ = ["crossing_words", "split_drawing", "split_table", "tied_words"]

_MOST_NAMES = 4


def split_table(report: StagesReport) -> Table:
    """Make a table with one row a stage, and totals; tied parameters count once there."""
    pieces = report.pieces
    copies = sum(row.bytes * (len(row.stages) - 1) for row in report.tied)
    table = Table(title="Stages", title_justify="left", show_footer=len(pieces) > 1)
    table.add_column("stage", justify="right", footer="all", no_wrap=True)
    table.add_column("modules", overflow="fold", ratio=1)
    size = format_bytes(sum(piece.parameter_bytes for piece in pieces) - copies)
    buffers = sum(piece.buffer_bytes for piece in pieces)
    columns = {
        "parameters": size,
        **({"buffers": format_bytes(buffers)} if buffers else {}),
        "sends on": format_bytes(sum(row.forward_bytes for row in report.crossings)),
        "back": format_bytes(sum(row.backward_bytes for row in report.crossings)),
    }
    for name, footer in columns.items():
        table.add_column(name, justify="right", footer=footer, no_wrap=True)
    for piece in pieces:
        sent = sum(row.forward_bytes for row in report.crossings if row.sender == piece.stage)
        returned = sum(row.backward_bytes for row in report.crossings if row.receiver == piece.stage)
        table.add_row(
            str(piece.stage),
            Text(", ".join(piece.modules) or "none"),  # Text: a name with brackets in it is no markup
            f"{format_count(piece.parameters)} ({format_bytes(piece.parameter_bytes)})",
            *([_size(piece.buffer_bytes)] if buffers else []),
            _size(sent),
            _size(returned),
        )
    return table


def split_drawing(report: StagesReport) -> Text:
    """Draw the stages one below the other; values that go past a stage have a line of their own."""
    lanes = _lanes(report)
    width = max((lane for lane in lanes.values()), default=-1) + 2
    lines = []
    for piece in report.pieces:
        for row in report.entering(piece.stage):
            gutter = _gutter(lanes, piece.stage - 0.5, width)
            lines.append(Text(f"│{gutter}            {crossing_words(row)}", "dim", no_wrap=True))
        gutter = _gutter(lanes, piece.stage, width)
        lines.append(Text(f"●{gutter}  {_stage_words(piece)}", no_wrap=True))
    lines.extend(Text(tied, "dim", no_wrap=True) for tied in tied_words(report))
    return Text("\n", overflow="ellipsis", no_wrap=True).join(lines)


def crossing_words(row: CrossingRow) -> str:
    """What crosses, in a line."""
    start = f"from stage {row.sender}: " if row.is_skip else ""
    back = f", {format_bytes(row.backward_bytes)} back" if row.backward_bytes else ""
    return f"{start}{format_bytes(row.forward_bytes)} on{back}: {first_few(row.values, _MOST_NAMES)}"


def tied_words(report: StagesReport) -> Iterator[str]:
    """Which parameters are tied, a line each."""
    for row in report.tied:
        stages = ", ".join(map(str, row.stages))
        yield f"tied: {' = '.join(row.names)} in stages {stages} ({format_bytes(row.bytes)})"


def _stage_words(piece: PieceRow) -> str:
    names = first_few(piece.modules, _MOST_NAMES) or "no modules"
    return f"stage {piece.stage:<3} {format_count(piece.parameters):>8}  {names}"


def _size(number: int) -> str:
    return format_bytes(number) if number else "none"


def _lanes(report: StagesReport) -> dict[tuple[int, int], int]:
    """A lane for each way past a stage, the same for ways that do not meet."""
    lanes: dict[tuple[int, int], int] = {}
    for row in sorted(report.crossings, key=lambda row: (row.sender, row.receiver)):
        if row.is_skip:
            taken = {lane for (_, end), lane in lanes.items() if end >= row.sender}
            lanes[row.sender, row.receiver] = next(n for n in range(len(lanes) + 1) if n not in taken)
    return lanes


def _gutter(lanes: dict[tuple[int, int], int], place: float, width: int) -> str:
    """The lanes at a stage, or half a stage before one."""
    cells = [" "] * (width - 1)
    for (start, end), lane in lanes.items():
        if start <= place <= end:
            cells[lane] = "┌" if place == start else "└" if place == end else "│"
    return "".join(cells)
