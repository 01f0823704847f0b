from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from partita.reporting import RankMemory, RunReport, report_text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_all_that_the_page_shows_is_there_in_any_width(report: RunReport, width: int) -> None:
    console = Console(width=width, record=True)
    for part in report_text(replace(report, memory=(RankMemory(0, 1e6, 2e6),)), width):
        console.print(part)
    text = console.export_text()
    words = " ".join(text.split())
    for expected in ("Decoder-only", "Measured", "Simulated", "The measured step is", "Memory by rank"):
        assert expected in words
    assert max(map(len, text.splitlines())) <= width
