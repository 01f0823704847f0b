from __future__ import annotations

import pytest

from partita.errors import PlanError
from partita.planning.hardware._sizes import read_bytes, write_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("2 TiB", 2 * 2**40),
        ("0", 0),
        (" 1.5kb ", 1500),
        ("12b", 12),
        (5, 5),
        ("7 bytes", 7),
    ],
)
def test_a_size_is_read(text: str | int, size: int) -> None:
    assert read_bytes(text, "memory") == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "80 XB", "1e3", "1.2.3GB", "nan", "80GB80GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"memory is '.*': write it like 80GB, 512MiB or 1000"):
        read_bytes(text, "memory")


@pytest.mark.parametrize("size", [-1, 1.5, None, True])
def test_a_number_must_be_a_whole_number_of_bytes(size: object) -> None:
    with pytest.raises(PlanError, match=r"memory is .*: give a whole number of at least 0"):
        read_bytes(size, "memory")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (80 * 10**9, "80 GB"), (1_234_567, "1.234567 MB")],
)
def test_a_size_is_written_as_it_is_read(size: int, text: str) -> None:
    assert write_bytes(size) == text
    assert read_bytes(text, "memory") == size


def test_a_size_is_rounded_to_the_next_unit_too() -> None:
    assert write_bytes(999_960, digits=3) == "1 MB"
    assert write_bytes(8_112_091_136, digits=3) == "8.11 GB"
    assert write_bytes(12, digits=3) == "12 bytes"
    assert write_bytes(10**20) == "100000 PB"
