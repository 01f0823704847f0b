from __future__ import annotations

import pytest
from rich.table import Table

from partita.cli.output.stdout import drawing_width, stdout_console


def test_what_is_no_terminal_gets_whole_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Piped output was cut to 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    console = stdout_console()
    table = Table()
    table.add_column("x" * 150)
    console.print(table)
    line = capsys.readouterr().out.splitlines()[1]
    assert line == f"┃ {'x' * 150} ┃"
    assert drawing_width(console) == 100


@pytest.mark.parametrize(("columns", "width", "drawing"), [("60", 60, 60), ("10", 10, 20)])
def test_a_width_that_is_given_counts(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int, drawing: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    console = stdout_console()
    assert (console.width, drawing_width(console)) == (width, drawing)
