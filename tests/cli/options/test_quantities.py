"""Times and sizes as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.cli.options.quantities import (
    parse_bytes,
    parse_count,
    parse_seconds,
    parse_seconds_list,
    parse_share,
)
from partita.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3ms", 3e-3),
        ("1.2s", 1.2),
        ("0", 0.0),
        (" 18522 us ", 18522e-6),
        ("7µs", 7e-6),
        ("7μs", 7e-6),
        ("2e-3", 2e-3),
        (".5s", 0.5),
        ("1.min", 60.0),
    ],
)
def test_a_time_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--f") == pytest.approx(seconds, rel=1e-12)


@given(st.integers(0, 10**17))
def test_a_plain_number_of_bytes_is_itself(size: int) -> None:
    assert parse_bytes(str(size), "--memory") == pytest.approx(size, rel=1e-15)


def test_decimal_and_binary_units_differ() -> None:
    assert parse_bytes("80GB", "--memory") == 80 * 10**9
    assert parse_bytes("80gib", "--memory") == 80 * 2**30


@pytest.mark.parametrize("text", ["", "ms", "-1s", "1,5s", "nan", "inf", "1 2 s", "0x10", "1e999", "one"])
def test_what_is_no_time_is_refused_by_its_option(text: str) -> None:
    with pytest.raises(UsageError, match="--f is"):
        parse_seconds(text, "--f")


def test_an_unknown_unit_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"--f is '3 parsecs': there is no unit 'parsecs', use ps, ns, us"):
        parse_seconds("3 parsecs", "--f")
    with pytest.raises(UsageError, match=r"--memory is '80 gigs': write it like 80GB, 512MiB or 1000"):
        parse_bytes("80 gigs", "--memory")


def test_several_times_stand_between_commas() -> None:
    assert parse_seconds_list("1s,20ms", "--f") == (1.0, 0.02)
    with pytest.raises(UsageError, match="--f is '1s,,2s': give a time"):
        parse_seconds_list("1s,,2s", "--f")


def test_a_share_is_at_most_all() -> None:
    assert [parse_share(text, "--w") for text in ("0", "1", "100 %", ".5")] == [0, 1, 1, 0.5]
    for text in ("1.1", "101%", "0.5GB"):
        with pytest.raises(UsageError, match="give a share from 0 to 1, or up to 100%"):
            parse_share(text, "--w")


def test_a_count_has_no_unit() -> None:
    assert parse_count("4.5", "--memory") == 4.5
    for text in ("4GB", "0"):
        with pytest.raises(UsageError, match="without a unit"):
            parse_count(text, "--memory")
