from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.reporting.step.test_html import Page

from partita.reporting import (
    CandidateRow,
    CutRow,
    Figure,
    GainRow,
    MemoryLane,
    PlannedStageRow,
    PlanReport,
    Timeline,
    TimelineSpan,
    render_plan_html,
)


def fake_plan_report(name: str = "layers.0-4") -> PlanReport:
    spans = [TimelineSpan(rank, f"{rank}F0", "F", rank, 0, float(rank), rank + 1.0) for rank in range(2)]
    stages = tuple(
        PlannedStageRow(
            n, n, (name,) * 12, 10, 40, 1.0, 2.0, 1.5 if n else None, 0.5 if n else None, 7, 160, 8, name
        )
        for n in range(2)
    )
    return PlanReport(
        title=name,
        subtitle=name,
        figures=(Figure("Step", "2.00 s", note=name),),
        timeline=Timeline.from_spans(name, spans),
        memory=(MemoryLane(0, ((0.0, 160.0), (1.0, 300.0)), 200.0), MemoryLane(1, ((0.0, 160.0),), 200.0)),
        stages=stages,
        cuts=(CutRow(0, name, name, 8, 0.001, (0, 1), name, name),),
        candidates=(
            CandidateRow(name, 2, 2.0, 0.5, 2.0, 0.5, 300.0, fits=False, note=name),
            CandidateRow("GPipe", 2, 3.0, 0.6, 3.0, 0.6, 100.0),
        ),
        left_out=((name, name),),
        gains=(GainRow("one more rank", 1.5, 100.0, name), GainRow(name, None)),
        critical=((name, 1.5), ("messages", 0.5)),
        environment={name: name},
    )


def test_the_page_has_every_section() -> None:
    page = Page(render_plan_html(fake_plan_report()))
    headings = [attributes.get("id") for tag, attributes in page.tags if tag == "h2"]
    assert headings == ["stages", "cuts", "timeline", "memory", "gains", "candidates", "environment"]
    for words in ("25.0 % shorter", "0 → 1", "chosen", "too much", "75.0 %", "1 that can't be"):
        assert words in page.words


def test_what_users_wrote_is_shown_literally() -> None:
    evil = "<script>alert(\"1\")</script> & <b>'bold'</b>"
    source = render_plan_html(fake_plan_report(evil))
    page = Page(source)
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    assert page.words.count(evil) >= 24
    assert evil not in source


def test_the_page_needs_nothing_from_elsewhere() -> None:
    source = render_plan_html(fake_plan_report())
    assert not re.search(r"https?:|//[a-z]|@import|url\(", source)
    assert source == render_plan_html(fake_plan_report())
    assert "default-src 'none'" in source


def test_parts_without_data_are_left_out() -> None:
    bare = PlanReport("t", "", (), Timeline("t", (), 0.0, 0.0))
    page = Page(render_plan_html(bare))
    assert [attributes.get("id") for tag, attributes in page.tags if tag == "h2"] == ["timeline"]
    assert "No spans were recorded." in page.words


@pytest.mark.parametrize(("makespan_s", "words"), [(2.0, "as long"), (4.0, "100.0 % longer")])
def test_a_gain_may_be_none_or_a_loss(makespan_s: float, words: str) -> None:
    report = replace(fake_plan_report(), gains=(GainRow("another rank", makespan_s),))
    assert words in Page(render_plan_html(report)).words


def test_wide_parts_scroll_and_have_names() -> None:
    page = Page(render_plan_html(fake_plan_report()))
    regions = [attributes for _, attributes in page.tags if attributes.get("role") == "region"]
    assert len(regions) == 7
    assert all(attributes.get("aria-label") and attributes.get("tabindex") == "0" for attributes in regions)
    tables = [attributes.get("class") for tag, attributes in page.tags if tag == "table"]
    assert {*tables} == {"wide-table", "narrow-table"}
