"""The edges of a pipeline, from either end."""

from __future__ import annotations

import pytest

from partita.errors import ScheduleError
from partita.planning.schedules.edges import edge_table


def test_without_edges_each_stage_feeds_the_next() -> None:
    table = edge_table(3)
    assert table.producers == ((), (0,), (1,))
    assert table.consumers == ((1,), (2,), ())


def test_both_ends_of_an_edge_know_it() -> None:
    table = edge_table(4, [(0, 3), (1, 2), (0, 2), (0, 2)])
    assert table.producers == ((), (), (0, 1), (0,))
    assert table.consumers == ((2, 3), (2,), (), ())


@pytest.mark.parametrize("edge", [(1, 1), (2, 1), (-1, 1), (0, 3)])
def test_an_edge_leads_to_a_later_stage_that_exists(edge: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match=f"from stage {edge[0]} to stage {edge[1]} can't be"):
        edge_table(3, [edge])
