"""Tables on narrow terminals: whole cells in fewer columns."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from partita.reporting.drawing.fitting_table import FittingColumn, FittingTable

TABLE = FittingTable(
    "Title",
    [
        FittingColumn("name", ["Interleaved1F1B", "GPipe"], justify="left"),
        FittingColumn("step", ["12.0 ms", "13.0 ms"]),
        FittingColumn("modules", ["first.one last.two", "third.three"], least_width=11, justify="left"),
        FittingColumn("span", ["10.0 ms", "11.0 ms"], left_out=1),
        FittingColumn("bubble", ["25.0 %", "26.0 %"], left_out=2),
    ],
    caption="below",
)


def printed(width: int) -> str:
    console = Console(width=width, file=StringIO())
    console.print(TABLE)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [200, 80, 60, 50, 40, 30, 20])
def test_no_cell_is_cut_at_any_width(width: int) -> None:
    text = printed(width)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    names = "".join(row[0].strip() for row in rows)
    assert names == "Interleaved1F1BGPipe"


def test_with_room_nothing_is_left_out_or_folded() -> None:
    text = printed(80)
    assert "first.one last.two" in text
    assert "below" in text
    assert "no room" not in text


def test_the_least_needed_columns_go_first_and_are_named() -> None:
    assert [line.rstrip() for line in printed(61).splitlines()][-1] == "no room for: span"
    text = printed(48)
    assert "no room for: span, bubble" in text
    assert "12.0 ms" in text
