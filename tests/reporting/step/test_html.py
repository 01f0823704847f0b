from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.reporting.fake_report import fake_backward

from partita.reporting import (
    BackwardPass,
    Figure,
    LossPoint,
    RankMemory,
    RunReport,
    StageRow,
    Timeline,
    render_html,
)

_VOID = {"meta", "link"}
_EMPTY = Timeline("Measured", (), 0.0, 0.0)


class Page(HTMLParser):
    """Reads a page; fails on tags that don't match, and keeps its text and its tags' attributes."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_has_every_section(report: RunReport) -> None:
    page = Page(render_html(report))
    headings = {attributes.get("id") for tag, attributes in page.tags if tag == "h2"}
    assert headings == {"plan", "losses", "timeline", "differences", "environment"}
    for words in (
        report.title,
        report.subtitle,
        "Largest parameter difference",
        "layers.4-8",
        "2.13.0 (CPU)",
    ):
        assert words in page.words


def test_what_each_rank_held_and_why_the_step_differs_is_said(report: RunReport) -> None:
    page = Page(render_html(replace(report, memory=(RankMemory(0, 2**20, 2**21, "as seen"),))))
    for words in (
        "Memory by rank",
        "2.00 MiB",
        "Measured: as seen",
        "The measured step is",
        "stage 2 backward",
    ):
        assert words in page.words


def test_a_backward_pass_has_a_section_beside_the_others(report: RunReport) -> None:
    page = Page(render_html(replace(report, backward=fake_backward())))
    headings = [attributes.get("id") for tag, attributes in page.tags if tag == "h2"]
    assert headings == ["buckets", "plan", "losses", "timeline", "differences", "environment"]
    for words in ("bucket 4", "layers.20.w", "2 more", "All buckets", "125 MiB"):
        assert words in page.words


def test_names_of_parameters_are_shown_literally(report: RunReport) -> None:
    evil = "<script>alert(1)</script>"
    bucket = replace(fake_backward(1).buckets[0], parameters=(evil,), dtype=evil)
    source = render_html(replace(report, backward=BackwardPass(0, 2, 0.06, (bucket,))))
    assert evil not in source
    assert Page(source).words.count(evil) >= 2


def test_the_page_needs_nothing_from_elsewhere(report: RunReport) -> None:
    source = render_html(report)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", source)
    page = Page(source)
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    links = [
        attributes[name] for _, attributes in page.tags for name in ("href", "src") if name in attributes
    ]
    assert links == ["data:,"]
    policies = [attributes.get("content") or "" for _, attributes in page.tags if "http-equiv" in attributes]
    assert policies[0].startswith("default-src 'none'")


def test_what_users_wrote_is_shown_literally(report: RunReport) -> None:
    evil = "<script>alert(\"1\")</script> & <b>'bold'</b>"
    spans = tuple(replace(span, label=evil, kind=evil) for span in report.measured.spans[:3])
    source = render_html(
        replace(
            report,
            title=evil,
            subtitle=evil,
            stages=(replace(report.stages[0], modules=(evil,) * 20),),
            measured=replace(report.measured, title=evil, spans=spans),
            figures=(Figure(evil, evil, evil, evil),),
            environment={evil: evil},
        )
    )
    page = Page(source)
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    assert page.words.count(evil) >= 20 + 3 + 4 + 2
    assert evil not in source


def test_the_same_report_gives_the_same_page(report: RunReport) -> None:
    assert render_html(report) == render_html(report)


def test_a_report_without_data_says_so() -> None:
    page = Page(render_html(RunReport("t", "", (), (), _EMPTY, replace(_EMPTY, title="Simulated"))))
    for words in ("No stages were recorded.", "No losses were recorded.", "No spans were recorded."):
        assert words in page.words


@pytest.mark.parametrize("loss", [0.0, math.nan, math.inf, -math.inf, 1e308])
@pytest.mark.parametrize("steps", [1, 3])
def test_any_loss_makes_a_page(report: RunReport, loss: float, steps: int) -> None:
    losses = tuple(LossPoint(step, loss, loss) for step in range(steps))
    page = Page(render_html(replace(report, losses=losses, validation=losses)))
    drawn = [
        value or ""
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name != "aria-label"
    ]
    assert not [value for value in drawn if re.search(r"\b(nan|inf)\b", value)]


def test_sixty_four_ranks_make_a_page(report: RunReport, make_timeline: Callable[..., Timeline]) -> None:
    many = make_timeline(costs=[(0.01, 0.02)] * 64, microbatches=16, send_s=0.001)
    row = report.stages[0]
    stages = tuple(replace(row, stage=number, rank=number) for number in range(64))
    page = Page(render_html(replace(report, stages=stages, measured=many, simulated=many)))
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 3
    assert "rank 63" in page.words


def test_one_stage_has_no_row_of_totals(report: RunReport) -> None:
    assert "All stages" in render_html(report)
    assert "All stages" not in render_html(replace(report, stages=report.stages[:1]))


def test_a_stage_of_nothing_has_empty_bars(report: RunReport) -> None:
    nothing = StageRow(0, 0, (), 0, 0, 0.0, 0.0, 0)
    assert 'style="width:0.00%"' in render_html(replace(report, stages=(nothing,)))


def test_many_modules_fold_away(report: RunReport) -> None:
    names = tuple(f"m{number}.x" for number in range(30))
    page = Page(render_html(replace(report, stages=(replace(report.stages[0], modules=names),))))
    assert "22 more" in page.words
    assert all(name in page.words for name in names)


def test_a_difference_is_bad_news_in_words_too(report: RunReport) -> None:
    losses = (LossPoint(0, 2.0, 2.0), LossPoint(1, 2.0, 1.0))
    assert "Difference: up to 1.00, at 1 of 2 steps." in render_html(replace(report, losses=losses))


def test_drawings_have_labels_and_scrolling_regions_have_names(report: RunReport) -> None:
    page = Page(render_html(report))
    for tag, attributes in page.tags:
        if tag == "svg" or attributes.get("role") == "region":
            assert attributes.get("aria-label")
