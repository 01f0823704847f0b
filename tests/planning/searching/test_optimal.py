from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.searching.orders.test_clock import stage_costs

from partita.errors import InfeasiblePlan, NotSupported, PlanError
from partita.planning import (
    Cluster,
    LinkLevel,
    StageCost,
    get_schedule,
    optimal_schedule,
    simulate,
    validate,
)
from partita.planning.generators.making.problem import scheduling_problem
from partita.planning.searching.orders.improve import Budget
from partita.planning.searching.orders.list_schedule import best_order

pytest.importorskip("ortools", reason="the extra 'solver' is not installed")
EQUAL = [StageCost(1.0, 2.0, activation_bytes=1, weight_activation_bytes=1)] * 2


def test_no_named_schedule_beats_it() -> None:
    best = optimal_schedule(EQUAL, 4)
    assert best.is_optimal
    assert best.makespan_s == pytest.approx(13.0)  # 4 (F + I + W), and the last rank waits for the first F
    for name in ("1F1B", "ZBH1", "ZBH2", "ZB2p"):
        assert simulate(get_schedule(name)(2, 4), EQUAL).makespan_s >= best.makespan_s - 1e-9


def test_memory_is_kept() -> None:
    cluster = Cluster(2, memory_bytes=1)
    best = optimal_schedule(EQUAL, 3, cluster=cluster)
    assert best.is_optimal
    assert max(simulate(best.schedule, EQUAL, cluster).peak_bytes) == 1


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_list_schedules_come_near_it(data: st.DataObject) -> None:
    costs = data.draw(stage_costs(2))
    cluster = Cluster(2, latency_s=data.draw(st.sampled_from([0.0, 0.5])), speeds=(1.0, 2.0))
    best = optimal_schedule(costs, 3, cluster=cluster, time_limit_s=10.0)
    validate(best.schedule)
    order = best_order(scheduling_problem(costs, (0, 1), 3, cluster), Budget(200_000))
    assert order is not None
    assert best.bound_s * (1 - 1e-6) <= order.end_s <= best.makespan_s * 1.05


def test_a_start_is_never_made_worse() -> None:
    start = get_schedule("ZBH1")(2, 3)
    best = optimal_schedule(EQUAL, 3, start=start, time_limit_s=0.0)
    assert best.makespan_s <= simulate(start, EQUAL).makespan_s


def test_too_little_memory_says_how_much_is_missing() -> None:
    costs = [StageCost(1.0, 2.0, activation_bytes=3, static_bytes=4)] * 2
    with pytest.raises(
        InfeasiblePlan, match="rank 0 takes 3 bytes for a microbatch and has 1: give it 2 more"
    ):
        optimal_schedule(costs, 2, cluster=Cluster(2, memory_bytes=5))


def test_links_that_ranks_share_are_refused() -> None:
    cluster = Cluster(3, levels=(LinkLevel(latency_s=1.0, ports=1),))
    with pytest.raises(NotSupported, match="give each pair of ranks a link of its own"):
        optimal_schedule([*EQUAL, EQUAL[0]], 2, cluster=cluster)


def test_the_cluster_must_have_the_ranks() -> None:
    with pytest.raises(PlanError, match="the placement has 2 ranks, the cluster 1: give it as many"):
        optimal_schedule(EQUAL, 2, cluster=Cluster(1))
