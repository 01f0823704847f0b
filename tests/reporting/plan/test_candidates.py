from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from partita.errors import ReportError
from partita.reporting import CandidateRow, candidate_table, limit_words


def shown(*rows: CandidateRow, **options: object) -> str:
    console = Console(width=120, file=StringIO())
    console.print(candidate_table(rows, **options))  # type: ignore[arg-type]
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


ROW = CandidateRow("[1F1B]", 4, 0.012, 0.25, 0.01, 0.1, 2**30)


def test_what_is_too_large_is_marked_and_the_limit_said() -> None:
    text = shown(ROW, CandidateRow("GPipe", 4, 0.012, 0.25, 0.01, 0.1, 2**31, fits=False), limits=[2**30])
    assert "[1F1B]" in text
    assert "2.00 GiB, too much" in text
    assert "a rank may hold 1.00 GiB" in text
    assert "recomputed" not in text


def test_notes_have_a_column_where_there_are_any() -> None:
    text = shown(CandidateRow("1F1B", 4, 1.0, 0.0, 1.0, 0.0, 3, note="stage 0"), unit="microbatches")
    assert "recomputed" in text
    assert "3 microbatches" in text


def test_a_time_that_is_no_number_is_refused() -> None:
    with pytest.raises(ReportError, match=r"CandidateRow.makespan_s is nan"):
        CandidateRow("x", 1, float("nan"), 0.0, 1.0, 0.0, 0.0)


def test_devices_that_differ_have_the_least_and_the_most_memory_said() -> None:
    assert limit_words([2**30, 2**31], "bytes") == "a rank may hold 1.00 GiB to 2.00 GiB"
    assert limit_words([2**30, None], "bytes") == "a rank may hold 1.00 GiB or more"
    assert limit_words([None], "bytes") == ""
