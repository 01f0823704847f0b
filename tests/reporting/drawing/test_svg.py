from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.reporting.drawing.svg import element, picture, points, text, title

words = st.text(st.characters(min_codepoint=32, exclude_categories=("Cs", "Cn", "Co", "Cc")))


@given(words)
def test_any_words_come_back_as_they_were(content: str) -> None:
    drawn = ElementTree.fromstring(element("g", {"class": content}, text(content, 1, 2), title(content)))
    assert drawn.get("class") == content
    assert [child.text or "" for child in drawn] == [content, content]


def test_an_attribute_that_is_none_is_left_out() -> None:
    assert element("rect", {"rx": None, "x": 1.0}) == '<rect x="1"/>'


@pytest.mark.parametrize(("value", "written"), [(1.0, "1"), (-0.001, "0"), (2.346, "2.35"), (100.0, "100")])
def test_numbers_are_short(value: float, written: str) -> None:
    assert element("a", {"x": value}) == f'<a x="{written}"/>'


def test_a_picture_is_labelled_for_screen_readers() -> None:
    drawn = ElementTree.fromstring(picture(10, 20, 'a "label"', [], "chart"))
    assert (drawn.get("role"), drawn.get("aria-label")) == ("img", 'a "label"')
    assert drawn.get("viewBox") == "0 0 10 20"


def test_points_are_pairs() -> None:
    assert points([(0.0, 1.0), (2.5, 3.0)]) == "0,1 2.5,3"
