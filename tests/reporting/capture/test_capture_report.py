"""The capture report: totals, tables, and a page that needs nothing else."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console
from tests.reporting.step.test_html import Page

from partita.errors import ReportError
from partita.reporting import (
    BreakRow,
    CaptureReport,
    GraphRow,
    LeftOutRow,
    RegionRow,
    capture_tables,
    render_capture_html,
)

REGION = RegionRow("region_0", "cuda:0", 20, 10, 2, 4.8e-5, "first_op", "last_op")
SMALL = replace(REGION, name="", nodes=2, launches=1, saved_s=-1e-5, captured=False)
LEFT_OUT = LeftOutRow("model.py:7: x.item()", ("aten.item",) * 5, "the host reads it", "keep it a tensor")
REPORT = CaptureReport(
    "model.py:build",
    "A note.",
    True,
    (GraphRow("forward 0", 25, (REGION, SMALL), (LEFT_OUT,)), GraphRow("backward 0", 3, (), ())),
    (BreakRow("model.py:9: print(x)", "it prints", "do not print"),),
    "",
    {"torch": "2"},
)


def shown(report: CaptureReport, width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for table in capture_tables(report):
        console.print(table)
    return console.export_text()


def test_totals_count_what_is_captured() -> None:
    assert (REPORT.nodes, REPORT.captured_nodes, REPORT.launches_saved) == (28, 20, 9)


def test_tables_have_a_row_for_each_region_line_and_break() -> None:
    text = shown(REPORT)
    for words in ("region_0 on cuda:0", "not worth it", "costs time", "20 of 28", "model.py:7: x.item()"):
        assert words in text
    for words in ("aten.item, aten.item, aten.item and 2 more", "model.py:9: print(x)", "do not print"):
        assert words in text


def test_nothing_to_say_is_not_said() -> None:
    text = shown(CaptureReport("t", "n", False, (GraphRow("inference 0", 3, (REGION,), ()),)))
    assert "Not captured" not in text
    assert "ends a graph" not in text
    assert "Every operator can be captured" in render_capture_html(
        CaptureReport("t", "n", False, (GraphRow("inference 0", 3, (REGION,), ()),))
    )


def test_the_page_says_the_same_and_needs_nothing_from_elsewhere() -> None:
    source = render_capture_html(REPORT)
    page = Page(source)
    for words in (
        "model.py:build",
        "A note.",
        "region_0 on cuda:0",
        "the host reads it",
        "do not print",
    ):
        assert words in page.words
    assert not re.search(r"https?:|//[a-z]|@import|url\(", source)
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in page.tags}


def test_what_users_wrote_is_shown_literally() -> None:
    evil = "<script>alert(\"1\")</script> & <b>'bold'</b> [red]x[/red]"
    left_out = LeftOutRow(evil, (evil,), evil, evil)
    report = replace(
        REPORT,
        title=evil,
        note=evil,
        stopped=evil,
        graphs=(GraphRow(evil, 1, (), (left_out,)),),
        breaks=(BreakRow(evil, evil, evil),),
        environment={evil: evil},
    )
    page = Page(render_capture_html(report))
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    assert page.words.count("alert") >= 7
    assert "[red]x[/red]" in shown(report, width=600)


def test_the_report_is_plain_data() -> None:
    found = json.loads(json.dumps(REPORT.as_dict()))
    assert found["launches_saved"] == 9
    assert found["graphs"][0]["regions"][1]["captured"] is False


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ReportError, match=r"RegionRow\.launches is -1; give 0 or more"):
        replace(REGION, launches=-1)
