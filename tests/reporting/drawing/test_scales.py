from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.reporting.drawing.scales import Scale, format_tick, ticks

bounds = st.floats(-1e6, 1e6)


@given(bounds, st.floats(1e-3, 1e6), st.integers(1, 20))
def test_ticks_lie_in_the_domain_rise_and_are_few(low: float, span: float, about: int) -> None:
    places = ticks(low, low + span, about)
    slack = 1e-6 * span
    assert len(places) <= about + 1
    assert all(low - slack <= place <= low + span + slack for place in places)
    assert list(places) == sorted(set(places))


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_ticks_of_any_domain_are_finite(one: float, other: float) -> None:
    assert all(math.isfinite(place) for place in ticks(min(one, other), max(one, other), 5))


def test_an_empty_domain_has_one_tick_and_maps_to_the_middle() -> None:
    assert ticks(3.0, 3.0, 5) == (3.0,)
    assert Scale(3.0, 3.0, 10.0, 20.0)(3.0) == 15.0


@given(bounds, st.floats(1e-3, 1e6))
def test_a_scale_maps_its_ends_to_the_ends(low: float, span: float) -> None:
    scale = Scale(low, low + span, 100.0, 500.0)
    assert scale(scale.low) == pytest.approx(100)
    assert scale(scale.high) == pytest.approx(500)


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (0.0, math.inf), (math.nan, 1.0)])
def test_a_scale_refuses_bounds_that_are_none(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=r"can't be drawn; give finite bounds in order"):
        Scale(low, high, 0.0, 1.0)


@given(st.floats(0.01, 100), st.floats(1e-4, 10))
def test_neighbouring_ticks_have_different_labels(low: float, span: float) -> None:
    places = ticks(low, low + span, 8)
    step = places[1] - places[0] if len(places) > 1 else 0.0
    labels = [format_tick(place, step) for place in places]
    assert len(set(labels)) == len(labels)
