"""The pieces of a model in the terminal."""

from __future__ import annotations

import io

from rich.console import Console
from tests.reporting.split.test_split_report import model_report

from partita.reporting import split_drawing, split_table


def test_ways_past_stages_have_lanes_that_do_not_meet() -> None:
    lines = [line[:4] for line in split_drawing(model_report()).plain.splitlines()]
    assert lines == [
        "●┌  ",
        "││  ",
        "●│┌ ",
        "│││ ",
        "│││ ",
        "●└│ ",
        "│ │ ",
        "│ │ ",
        "● └ ",
        "tied",
    ]


def test_the_table_has_totals_in_which_tied_parameters_count_once() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(split_table(model_report()))
    text = out.getvalue()
    assert "buffers" not in text
    assert "[bold]" in text  # a name is no markup
    assert "23.4 KiB" in text  # 24000 bytes less one copy of 40
