from __future__ import annotations

from random import Random

import pytest

from partita.planning import Cluster, Schedule, StageCost, get_schedule
from partita.planning.generators.making.problem import Problem, scheduling_problem
from partita.planning.searching.orders.clock import rows_of, run_rows
from partita.planning.searching.orders.fixed_order import FixedOrders, ends_of, fixed_order


def _problem(random: Random, stage_ranks: tuple[int, ...], microbatches: int) -> Problem:
    costs = [StageCost(*(random.uniform(0.1, 3.0) for _ in range(4)), send_bytes=3) for _ in stage_ranks]
    cluster = Cluster(max(stage_ranks) + 1, random.choice((2.0, 20.0)), random.choice((0.0, 0.3)))
    return scheduling_problem(costs, stage_ranks, microbatches, cluster)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBH2", "ZBVZeroBubble", "ForwardOnly"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_order_serves_all_costs_and_times_them_to_the_last_bit(name: str, ranks: int) -> None:
    random = Random(ranks)
    schedule = get_schedule(name)(2 * ranks, 5, ranks)
    rows = rows_of(schedule)
    order = fixed_order(_problem(random, schedule.stage_ranks, 5), rows)
    assert order is not None
    for _ in range(10):
        problem = _problem(random, schedule.stage_ranks, 5)
        timing = run_rows(problem, rows)
        assert timing is not None
        assert ends_of(problem, order) == timing.ends


def test_rows_that_wait_for_each_other_have_no_order() -> None:
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    rows, problem = rows_of(schedule), _problem(Random(0), schedule.stage_ranks, 2)
    assert fixed_order(problem, rows) is None
    orders = FixedOrders()
    assert [orders.ends(problem, rows, again=again) for again in (False, True, True)] == [None] * 3


def test_the_same_rows_on_other_ranks_have_an_order_of_their_own() -> None:
    rows = rows_of(get_schedule("1F1B")(2, 4))
    orders, random = FixedOrders(), Random(0)
    for stage_ranks in ((0, 1), (0, 1), (1, 0)):
        problem = _problem(random, stage_ranks, 4)
        own = [rows[stage_ranks.index(rank)] for rank in range(2)]
        placed = rows if stage_ranks == (0, 1) else own
        assert orders.ends(problem, placed, again=True) == orders.ends(problem, placed, again=False)
