from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from rich.table import Table

from partita.cli.output.stdout import drawing_width, refuse_full_disk, stdout_console, take_any_character
from partita.errors import UsageError


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


@pytest.mark.parametrize(
    ("encoding", "errors", "shown"),
    [
        ("ascii", "strict", "3.0 us x 2 ~ * ??"),
        ("latin-1", "surrogateescape", "3.0 \N{MICRO SIGN}s × 2 ~ * ??"),
        ("utf-8", "strict", "3.0 \N{MICRO SIGN}s × 2 … ● 値?"),  # a file name that is no UTF-8
        ("ascii", "ignore", "3.0 s  2   "),  # as PYTHONIOENCODING asks for
    ],
)
def test_a_character_that_the_encoding_has_not_is_shown_by_one_like_it(
    monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str, shown: str
) -> None:
    """Under ``LC_ALL=C`` a step of 3 µs ended in Python's UnicodeEncodeError, and so did every plan."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors=errors))
    take_any_character()
    sys.stdout.write("3.0 \N{MICRO SIGN}s × 2 … ● 値\udcff")
    sys.stdout.flush()
    assert raw.getvalue().decode(encoding) == shown


def write_and_flush(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_full_disk_behind_standard_output_is_a_message(
    monkeypatch: pytest.MonkeyPatch, unbuffered: bool
) -> None:
    """``partita simulate > /dev/full`` ended in forty lines of traceback."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        buffer = full if unbuffered else io.BufferedWriter(full)
        full_output = io.TextIOWrapper(buffer, write_through=unbuffered)  # type: ignore[type-var]
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, full_output)
        refuse_full_disk()
        with pytest.raises(UsageError, match=r"standard output can't be written to .No space left on device"):
            write_and_flush("table")
        sys.stdout.flush()  # as Python does when it ends: what is left is dropped
        sys.stdout.close()


def test_a_reader_that_has_left_is_no_mistake_of_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as pipe:
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, pipe)
        refuse_full_disk()
        with pytest.raises(BrokenPipeError):
            write_and_flush("table")
        sys.stdout.close()
