from __future__ import annotations

from partita.planning import Cluster, CostModel, Unit
from partita.planning.cutting.cut_problem import make_cut_problem
from partita.planning.searching.layouts import layouts, rearranged, swapped


def test_equal_ranks_stay_in_their_order() -> None:
    placements = [layout.stage_ranks for layout in layouts(Cluster(2), (1, 2), 9)]
    assert placements == [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0)]


def test_no_more_stages_than_the_model_has() -> None:
    assert [layout.stage_ranks for layout in layouts(Cluster(2), (1, 2), 3)] == [(0, 1)]


def test_unequal_ranks_stand_in_every_order_that_differs() -> None:
    cluster = Cluster(3, speeds=(1.0, 1.0, 3.0))
    orders = {layout.stage_ranks for layout in layouts(cluster, (1,), 3)}
    assert {order.index(2) for order in orders} == {0, 1, 2}
    assert len(orders) == 3


def test_many_unequal_ranks_stand_in_a_few_orders() -> None:
    cluster = Cluster(8, speeds=tuple(range(1, 9)))
    orders = [layout.stage_ranks for layout in layouts(cluster, (1,), 8)]
    assert tuple(range(8)) in orders
    assert tuple(reversed(range(8))) in orders
    assert len(orders) <= 4


def test_only_unequal_ranks_change_places() -> None:
    layout = next(layouts(Cluster(3, speeds=(1.0, 1.0, 3.0)), (1,), 3))
    changed = [other.stage_ranks for other in swapped(layout, Cluster(3, speeds=(1.0, 1.0, 3.0)))]
    assert changed == [(2, 1, 0), (0, 2, 1)]


def test_free_placements_leave_every_rank_a_stage_and_every_stage_a_unit() -> None:
    units = tuple(Unit(f"u{index}", 1.0, 2.0) for index in range(6))
    problem = make_cut_problem(CostModel(units, (1,) * 5), None, (1,) * 4, 1.0, hides_transfers=True)
    layout = next(layouts(Cluster(2), (2,), 6))
    moves = list(rearranged(layout, (0, 1, 3, 5, 6), problem))
    assert len({(one.stage_ranks, cuts) for one, cuts in moves}) > 10
    for one, cuts in moves:
        assert set(one.stage_ranks) == {0, 1}
        assert len(cuts) == len(one.stage_ranks) + 1
        assert list(cuts) == sorted(set(cuts))
        assert (cuts[0], cuts[-1]) == (0, 6)
    assert {len(cuts) for _, cuts in moves} == {4, 5, 6}
