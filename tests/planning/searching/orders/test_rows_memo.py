from __future__ import annotations

from partita.planning.searching.orders.clock import Rows
from partita.planning.searching.orders.rows_memo import RowsMemo


def rows(passes: int) -> Rows:
    return [[(0, 0, number) for number in range(passes)]]


def test_values_belong_to_the_lists_and_not_to_what_they_hold() -> None:
    memo, one = RowsMemo[int](), rows(3)
    memo.of(one)["key"] = 1
    assert memo.of([one[0]]) == {"key": 1}
    assert memo.of(rows(3)) == {}


def test_no_more_passes_are_remembered_than_may_be() -> None:
    memo = RowsMemo[int](passes_kept=5)
    one, other = rows(3), rows(3)
    memo.of(one)["key"] = 1
    memo.of(other)["key"] = 2
    assert (memo.of(other), memo.of(one)) == ({"key": 2}, {})
