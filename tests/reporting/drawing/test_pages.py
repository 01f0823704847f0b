"""What a checker in a browser would say of the pages, without a browser: names, headings, tables, what
scrolls, and the contrast of text with what it stands on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.reporting.capture.test_capture_report import REPORT as CAPTURE
from tests.reporting.comparison.test_comparison_html import comparison
from tests.reporting.fake_report import fake_backward
from tests.reporting.plan.test_plan_html import fake_plan_report
from tests.reporting.split.test_split_report import model_report
from tests.reporting.step.test_html import Page

import partita.reporting
from partita.reporting import (
    RankMemory,
    RunReport,
    render_capture_html,
    render_comparison_html,
    render_html,
    render_plan_html,
    render_split_html,
)
from partita.reporting.drawing.palette import Colour, contrast

PAGES: dict[str, Callable[[RunReport], str]] = {
    "run": lambda report: render_html(
        replace(report, backward=fake_backward(), memory=(RankMemory(0, 2**20, 2**21, "as seen"),))
    ),
    "comparison": lambda report: render_comparison_html(comparison(report)),
    "plan": lambda report: render_plan_html(fake_plan_report()),
    "split": lambda report: render_split_html(model_report()),
    "capture": lambda report: render_capture_html(CAPTURE),
}
STYLE = (Path(partita.reporting.__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
TEXT_ON = {
    "ink": ("paper", "card", "lane"),
    "quiet": ("paper", "card", "good-paper", "bad-paper"),
    "accent": ("paper", "card"),
    "good": ("card", "good-paper"),
    "bad": ("card", "bad-paper"),
}
"""Which colours text has, and what it stands on."""


@pytest.mark.parametrize("name", PAGES)
def test_all_of_a_page_can_be_read_aloud_and_reached_by_keyboard(name: str, report: RunReport) -> None:
    source = PAGES[name](report)
    page = Page(source)
    assert ("html", {"lang": "en"}) in page.tags
    assert re.search(r"<title>[^<]*\w[^<]*</title>", source.partition("<svg")[0])
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
        if tag == "svg":
            assert attributes.get("role") == "img"
        if tag == "th":
            assert attributes.get("scope") in {"row", "col"}
        if "scroll" in (attributes.get("class") or "").split():
            assert (attributes.get("role"), attributes.get("tabindex")) == ("region", "0")
        if attributes.get("role") in {"img", "region"}:
            assert attributes.get("aria-label")
    named = re.findall(r'role="region" aria-label="([^"]+)"', source) + re.findall(
        "<h2[^>]*>([^<]+)<", source
    )
    assert len(named) == len(set(named)), "regions of one name can't be told apart"
    assert not re.search("<th[^>]*></th>", source)


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_text_on_a_page_has_contrast(scheme: str) -> None:
    light, dark, printed = (dict(_colours(block)) for block in re.findall(r":root \{([^}]*)\}", STYLE))
    colours = light | {"light": {}, "dark": dark, "print": printed}[scheme]
    for text, papers in TEXT_ON.items():
        for paper in papers:
            assert contrast(colours[text], colours[paper]) >= 4.5, f"{text} on {paper}"


def _colours(block: str) -> list[tuple[str, Colour]]:
    """Those of custom properties, by name."""
    written = re.findall(r"--([\w-]+): #([0-9a-f]{3}|[0-9a-f]{6});", block)
    full = ((name, "".join(2 * part for part in code) if len(code) == 3 else code) for name, code in written)
    return [(name, Colour(*bytes.fromhex(code))) for name, code in full]
