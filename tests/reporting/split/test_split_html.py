"""The pieces of a model as a page."""

from __future__ import annotations

from dataclasses import replace

from tests.reporting.split.test_split_report import model_report
from tests.reporting.step.test_html import Page

from partita.reporting import render_split_html


def test_the_page_has_no_markup_of_users() -> None:
    html = render_split_html(model_report())
    assert "<script" not in html
    assert html == render_split_html(model_report())
    assert "Tied parameters" in Page(html).words
    assert "Nothing crosses." in Page(render_split_html(replace(model_report(), crossings=(), tied=()))).words
