from __future__ import annotations

from dataclasses import replace

import pytest

from partita.errors import PlanError, ScheduleError
from partita.planning import (
    Cluster,
    CostModel,
    Plan,
    Unit,
    get_schedule,
    plan_stages,
    recomputed_cost,
    schedule_of,
    simulate,
    stage_costs,
)

UNITS = tuple(Unit(f"u{index}", 1.0, 2.0, parameter_bytes=1, activation_bytes=4) for index in range(8))
COSTS = CostModel(UNITS, (4,) * 7)


def test_a_named_schedule_is_made_by_its_name() -> None:
    for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        plan = plan_stages(COSTS, 4, cluster=Cluster(2), schedule=name)
        assert schedule_of(plan) == get_schedule(name)(4, 8, 2)


def test_another_placement_is_kept() -> None:
    plan = replace(plan_stages(COSTS, 4, cluster=Cluster(2)), placement=(1, 0, 1, 0))
    assert schedule_of(plan).stage_ranks == (1, 0, 1, 0)


def test_a_placement_that_the_schedule_can_not_serve_is_refused() -> None:
    plan = replace(plan_stages(COSTS, 4, schedule="VHalf"), placement=(1, 0, 0, 1))
    with pytest.raises(ScheduleError, match="VHalf with the placement"):
        schedule_of(plan)


def test_an_order_of_its_own_survives_json() -> None:
    order = replace(get_schedule("ZBH1")(2, 8), name="mine")
    plan = replace(plan_stages(COSTS, 2), schedule="mine", order=order)
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert schedule_of(read) == order
    assert [change.what for change in plan_stages(COSTS, 2).difference(plan)] == ["schedule", "order"]


def test_an_order_for_another_placement_or_other_microbatches_is_refused() -> None:
    plan = plan_stages(COSTS, 2)
    with pytest.raises(PlanError, match=r"the order has its stages on ranks \(0, 1, 0, 1\)"):
        replace(plan, order=get_schedule("1F1B")(4, 8, 2))
    with pytest.raises(PlanError, match="the order has 3 microbatches, the plan 8"):
        replace(plan, order=get_schedule("1F1B")(2, 3))


def test_what_a_stage_recomputes_counts_in_the_simulation() -> None:
    plan = plan_stages(COSTS, 2)
    first = plan.stages[0]
    region = ((first.first_unit, first.last_unit),)
    recomputed = recomputed_cost(COSTS, *region[0], region)
    again = replace(plan, stages=(replace(first, recompute=region, recomputed=recomputed), plan.stages[1]))
    assert Plan.from_json(again.to_json()) == again
    assert stage_costs(again)[0].static_bytes == stage_costs(plan)[0].static_bytes
    before, after = (simulate(schedule_of(one), one) for one in (plan, again))
    assert after.makespan_s > before.makespan_s
    assert after.peak_bytes[0] < before.peak_bytes[0]
    unknown = replace(plan, stages=(replace(first, recompute=region), plan.stages[1]))
    with pytest.raises(PlanError, match="stage 0 recomputes units, and its `recomputed` is empty"):
        stage_costs(unknown)


@pytest.mark.parametrize("regions", [((0, 9),), ((1, 0),), ((0, 1), (1, 2))])
def test_regions_outside_of_the_stage_are_refused(regions: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError, match="in order and apart"):
        replace(plan_stages(COSTS, 2).stages[0], recompute=regions)
