from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.reporting import (
    format_bytes,
    format_count,
    format_loss,
    format_number,
    format_seconds,
    format_share,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2**20 - 1, "1.00 MiB"), (-2048, "-2.00 KiB")],
)
def test_bytes_take_the_binary_unit_that_fits(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (999_999, "1.00 M"), (7_000_000_000, "7.00 G")],
)
def test_counts_take_the_prefix_that_fits(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (3e-9, "3.00 ns"),
        (1e-300, "< 1 ps"),
        (0.00099996, "1.00 ms"),
        (0.9999, "1.00 s"),
        (99.96, "1 min 40 s"),
        (3599.0, "59 min 59 s"),
        (3600.0, "1 h 0 min"),
        (-0.5, "-500 ms"),
        (math.inf, "∞ s"),
    ],
)
def test_seconds_take_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_an_exact_zero_is_told_from_a_tiny_number() -> None:
    assert format_number(0.0) == "0.0"
    assert format_number(1e-300) == "1.00e-300"


@pytest.mark.parametrize("format_", [format_loss, format_number, format_share])
def test_what_is_not_finite_is_named(format_) -> None:
    assert format_(math.nan) == "NaN"
    assert format_(math.inf) == "∞"
    assert format_(-math.inf) == "-∞"


@given(st.floats(min_value=0, max_value=1e15))
def test_no_size_count_or_duration_is_wide(value: float) -> None:
    assert len(format_bytes(value)) <= 9
    assert len(format_count(value)) <= 7
    # Hours are not abbreviated: who waits for years may need the room.
    if value < 1e6:
        assert len(format_seconds(value)) <= 12


@given(st.floats(min_value=1e-3, max_value=9e6))
def test_three_digits_are_right_to_a_percent(value: float) -> None:
    assert float(format_number(value).replace(",", "")) == pytest.approx(value, rel=0.01)
