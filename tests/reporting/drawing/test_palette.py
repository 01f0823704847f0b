from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.reporting.drawing.palette import BLACK, KINDS, WHITE, Colour, contrast, ink_on, kind_style, shade

parts = st.integers(0, 255)


def test_contrast_is_21_between_black_and_white() -> None:
    assert contrast(BLACK, WHITE) == pytest.approx(21)


@given(st.builds(Colour, parts, parts, parts))
def test_text_on_any_colour_is_readable(colour: Colour) -> None:
    assert contrast(ink_on(colour), colour) >= 4.5


@given(st.floats(allow_nan=False))
def test_a_shade_is_a_colour_wherever_it_lies(position: float) -> None:
    assert all(0 <= part <= 255 for part in shade(KINDS["F"].colour, position))


def apart(one: Colour, other: Colour) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def test_shading_leaves_kinds_at_least_half_as_far_apart_as_their_hues() -> None:
    for (_, one), (_, other) in combinations(KINDS.values(), 2):
        assert apart(one, other) > 80
        assert apart(shade(one, 1.0), shade(other, 1.0)) > apart(one, other) / 2


def test_a_kind_that_is_not_known_goes_by_its_own_name() -> None:
    assert kind_style("optimizer").name == "optimizer"
    assert kind_style("optimizer").colour not in {style.colour for style in KINDS.values()}
