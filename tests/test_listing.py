"""Lists of names in messages."""

from __future__ import annotations

import pytest

from partita.listing import first_few, listed, shared_atoms


def test_all_are_listed_where_they_are_few() -> None:
    assert first_few(iter("abc"), limit=3) == "a, b, c"
    assert listed([0, "a"]) == "0, 'a'"
    assert first_few([]) == ""


def test_many_are_counted() -> None:
    assert listed(range(1000), limit=2) == "0, 1 and 998 more"


@pytest.mark.parametrize(
    ("left", "right", "atoms"),
    [("a.b", "a.b", 2), ("a.b", "a", 1), ("a.b", "ab.b", 0), ("a.x.c", "a.y.c", 1)],
)
def test_only_whole_atoms_from_the_first_on_are_shared(left: str, right: str, atoms: int) -> None:
    assert shared_atoms(left, right) == shared_atoms(right, left) == atoms
