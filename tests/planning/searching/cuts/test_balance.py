from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from partita.planning import CostModel, Unit, loop_placement
from partita.planning.cutting.cut_problem import make_cut_problem
from partita.planning.searching.cuts.balance import all_cuts, balanced_cuts, cut_moves, rank_work


@given(st.lists(st.integers(0, 9), min_size=2, max_size=9), st.data())
@settings(max_examples=60, deadline=None)
def test_the_busiest_rank_is_near_the_best_that_can_be(times: list[int], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 3))
    stages = data.draw(st.sampled_from([ranks, 2 * ranks]))
    speeds = data.draw(st.tuples(*[st.sampled_from([1.0, 3.0])] * ranks))
    units = tuple(Unit(f"u{index}", float(time), 0.0) for index, time in enumerate(times))
    problem = make_cut_problem(
        CostModel(units, (1,) * (len(units) - 1)), None, (1,) * stages, 1.0, hides_transfers=True
    )
    placement = loop_placement(stages, ranks)
    cuts = balanced_cuts(problem, placement, speeds)
    if stages > len(units):
        assert cuts is None
        return
    assert cuts is not None
    assert list(cuts) == sorted(set(cuts))
    assert (cuts[0], cuts[-1]) == (0, len(units))
    best = min(max(rank_work(problem, one, placement, speeds)) for one in all_cuts(problem, stages, 10**6))
    # Within the largest unit of the best: borders move one or two at a time.
    assert max(rank_work(problem, cuts, placement, speeds)) <= best + max(times) / max(sum(times), 1)


def test_moves_leave_every_stage_a_unit() -> None:
    units = tuple(Unit(f"u{index}", 1.0, 0.0) for index in range(6))
    problem = make_cut_problem(CostModel(units, (1,) * 5), None, (1, 1, 1), 1.0, hides_transfers=True)
    moves = set(cut_moves(problem, (0, 2, 4, 6)))
    assert moves == {(0, 1, 4, 6), (0, 3, 4, 6), (0, 2, 3, 6), (0, 2, 5, 6), (0, 1, 3, 6), (0, 3, 5, 6)}


def test_all_cuts_or_none() -> None:
    units = tuple(Unit(f"u{index}", 1.0, 0.0) for index in range(5))
    problem = make_cut_problem(CostModel(units, (1,) * 4), None, (1, 1, 1), 1.0, hides_transfers=True)
    assert all_cuts(problem, 3, 6) == [(0, *inner, 5) for inner in combinations(range(1, 5), 2)]
    assert all_cuts(problem, 3, 5) == []
