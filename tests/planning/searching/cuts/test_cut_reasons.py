from __future__ import annotations

from dataclasses import replace

import pytest

from partita.errors import PlanError
from partita.planning import (
    Cluster,
    CostModel,
    Plan,
    Unit,
    explain_cuts,
    plan_stages,
    schedule_of,
    search,
    simulate,
)
from partita.planning.cutting.make_stage import make_stage
from partita.planning.searching.cuts import cut_reasons

UNITS = tuple(Unit(f"u{index}", 1.0 + index % 3, 2.0, activation_bytes=3) for index in range(9))
COSTS = CostModel(UNITS, tuple(range(1, 9)))


def test_the_next_best_is_what_the_simulator_says_of_it() -> None:
    plan = plan_stages(COSTS, 3)
    for index, reason in enumerate(explain_cuts(COSTS, plan)):
        assert reason.border == plan.stages[index].last_unit
        assert reason.makespan_s == pytest.approx(simulate(schedule_of(plan), plan).makespan_s)
        assert reason.next_border is not None
        ends = [stage.last_unit for stage in plan.stages]
        ends[index] = reason.next_border
        starts = [0, *(end + 1 for end in ends)]
        stages = tuple(make_stage(COSTS, number, starts[number], end) for number, end in enumerate(ends))
        moved = simulate(schedule_of(plan), replace(plan, stages=stages)).makespan_s
        assert reason.next_makespan_s == pytest.approx(moved)
        assert f"cut between '{reason.next_before}' and '{reason.next_after}'" in str(reason)


def test_of_a_very_large_step_one_place_is_looked_at_the_one_with_the_least_work_for_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    units = tuple(Unit(f"u{index}", 1.0, 2.0) for index in range(8))
    costs, cluster = CostModel(units, (0,) * 7), Cluster(2, speeds=(1.0, 3.0))
    plan = plan_stages(costs, 2, cluster=cluster)
    monkeypatch.setattr(cut_reasons, "_MOST_PASSES", 0)
    (reason,) = explain_cuts(costs, plan)
    assert plan.stages[0].last_unit == 1  # 6 s and 18 s / 3
    assert reason.next_border == 0  # 3 s and 21 s / 3; on the other side 9 s and 15 s / 3


def test_a_search_says_why_and_it_survives_json() -> None:
    best = search(COSTS, Cluster(2), microbatches=4)[0].plan
    assert len(best.cuts) == len(best.stages) - 1
    assert Plan.from_json(best.to_json()) == best
    for reason in best.cuts:
        assert reason.next_makespan_s is None or reason.next_makespan_s >= reason.makespan_s * (1 - 1e-9)


def test_where_no_other_place_fits_it_says_so() -> None:
    costs = CostModel(UNITS[:2], (4,))
    (reason,) = explain_cuts(costs, plan_stages(costs, 2))
    assert reason.next_border is None
    assert str(reason).endswith("no other place fits")


def test_other_costs_are_refused() -> None:
    with pytest.raises(PlanError, match="the plan has 2 units, the costs 9"):
        explain_cuts(COSTS, plan_stages(CostModel(UNITS[:2], (4,)), 2))
