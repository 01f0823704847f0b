from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from rich.console import Console

from partita.reporting import (
    RunComparison,
    RunReport,
    compared_report,
    comparison_table,
    render_comparison_html,
)


def comparison(report: RunReport) -> RunComparison:
    quicker = replace(report, measured=replace(report.measured, makespan_s=report.measured.makespan_s / 2))
    return RunComparison("Two & more", (compared_report(report, "<slow>"), compared_report(quicker, "quick")))


def test_the_page_marks_the_best_and_escapes_names(report: RunReport) -> None:
    page = render_comparison_html(comparison(report))
    assert "&lt;slow&gt;" in page
    assert "<slow>" not in page
    assert page.count('class="best"') == 1
    assert "<script" not in page
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert page == render_comparison_html(comparison(report))


def test_the_table_has_a_column_a_run(report: RunReport) -> None:
    console = Console(width=80, record=True)
    console.print(comparison_table(comparison(report)))
    text = console.export_text()
    assert "<slow>" in text
    assert "Step" in text
    assert "1F1B" in text
