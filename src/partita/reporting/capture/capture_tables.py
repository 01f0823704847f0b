"""Tables for the terminal: what is captured, what is not, and where graphs end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from partita.listing import first_few
from partita.reporting.capture.capture_report import CaptureReport, GraphRow, LeftOutRow
from partita.reporting.drawing.units import format_seconds, format_share

__all__ = ["break_table", "capture_tables", "left_out_table", "operator_list", "region_table"]

_MOST_OPERATORS = 3


def capture_tables(report: CaptureReport) -> list[Table]:
    """Make the tables of a report that have rows, in order."""
    tables = [region_table(report.graphs)] if report.graphs else []
    if any(graph.left_out for graph in report.graphs):
        tables.append(left_out_table(report.graphs))
    if report.breaks:
        tables.append(break_table(report))
    return tables


def region_table(graphs: Sequence[GraphRow]) -> Table:
    """Make a table with one row a region, and a footer with what is saved of all launches."""
    saved = sum(graph.launches_saved for graph in graphs)
    nodes = sum(graph.nodes for graph in graphs)
    captured = sum(graph.captured_nodes for graph in graphs)
    share = format_share(captured / nodes) if nodes else "none"
    table = Table(title="Captured", title_justify="left", show_footer=True)
    table.add_column("graph", footer="all")
    table.add_column("region", footer="")
    table.add_column("nodes", justify="right", footer=f"{captured} of {nodes}\n({share})", no_wrap=True)
    table.add_column("launches", justify="right", footer="", no_wrap=True)
    table.add_column("saved", justify="right", footer=str(saved), no_wrap=True)
    table.add_column("copies", justify="right", footer="", no_wrap=True)
    table.add_column("time saved\n(assumed)", justify="right", footer="", no_wrap=True)
    for graph in graphs:
        if not graph.regions:
            table.add_row(Text(graph.name), "none", f"0 of {graph.nodes}", *[""] * 4)
        for region in graph.regions:
            time = format_seconds(region.saved_s) if region.saved_s >= 0 else "costs time"
            table.add_row(
                Text(graph.name),
                Text(f"{region.name} on {region.device}" if region.captured else "not worth it"),
                str(region.nodes),
                str(region.launches),
                str(region.launches - 1) if region.captured else "0",
                str(region.copies),
                time,
                style="" if region.captured else "dim",
            )
    return table


def left_out_table(graphs: Sequence[GraphRow]) -> Table:
    """Make a table of the lines of the user's code with something that can't be captured."""
    table = _two_columns("Not captured")
    for graph in graphs:
        for row in graph.left_out:
            place = Text(row.source or "no line is known")
            place.append(f"\n{operator_list(row)}, in {graph.name}", "dim")
            table.add_row(place, _reason(row.reason, row.way_out))
    return table


def break_table(report: CaptureReport) -> Table:
    """Make a table of the places where a graph ends, or would by default, or a function is left to Python."""
    table = _two_columns("torch.compile ends a graph")
    for row in report.breaks:
        place = Text(row.source or "no line is known")
        if row.kept:
            place.append("\nby default; kept in the graph here", "dim")
        table.add_row(place, _reason(row.reason, row.way_out))
    return table


def _two_columns(title: str) -> Table:
    """Where, and why with what to do below it: two columns can be read in 80 characters, and five can't."""
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("where", overflow="fold", ratio=1)
    table.add_column("why, and what to do", overflow="fold", ratio=1)
    return table


def _reason(reason: str, way_out: str) -> Text:
    return Text(reason).append(f"\n→ {way_out}" if way_out else "", "italic")


def operator_list(row: LeftOutRow) -> str:
    """Return the first operators of a line, and how many there are besides.

    >>> operator_list(LeftOutRow("", ("a", "b", "c", "d", "e"), "", ""))
    'a, b, c and 2 more'
    """
    return first_few(row.operators, _MOST_OPERATORS)
