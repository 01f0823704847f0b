from __future__ import annotations

from dataclasses import replace

import pytest

from partita.planning import (
    Cluster,
    CostModel,
    CutReason,
    Plan,
    Unit,
    get_schedule,
    plan_stages,
    recomputed_cost,
    schedule_of,
    simulate,
)
from partita.reporting import (
    critical_shares,
    cut_rows,
    memory_lanes,
    planned_stage_rows,
    recomputed_words,
    stage_rows,
)

UNITS = tuple(
    Unit(f"{n}:add", 0.1, 0.2, 40, 10, activation_bytes=100, modules=(f"layers.{n}.mlp",)) for n in range(6)
)
COSTS = CostModel(UNITS, (8,) * 5)


def example() -> Plan:
    return plan_stages(COSTS, 3, cluster=Cluster(3, bandwidth_bytes_per_s=800.0, memory_bytes=10**6))


def test_stages_have_short_names_of_what_they_hold() -> None:
    rows = planned_stage_rows(example())
    assert [row.modules for row in rows] == [("layers.0-1",), ("layers.2-3",), ("layers.4-5",)]
    assert rows[0].static_bytes == 4 * 80
    assert rows[0].input_s is None
    assert [row.modules for row in stage_rows(example())] == [row.modules for row in rows]
    bare = replace(COSTS, units=tuple(replace(unit, modules=()) for unit in UNITS))
    assert planned_stage_rows(plan_stages(bare, 3))[1].modules == ("units 2 to 3",)


def test_what_is_computed_again_is_said_and_counted() -> None:
    plan = example()
    whole, part = plan.stages[0], plan.stages[1]
    stages = (
        replace(whole, recompute=((0, 1),), recomputed=recomputed_cost(COSTS, 0, 1, [(0, 1)])),
        replace(part, recompute=((2, 2),), recomputed=recomputed_cost(COSTS, 2, 3, [(2, 2)])),
        plan.stages[2],
    )
    again = replace(plan, stages=stages)
    assert [recomputed_words(again, n) for n in range(3)] == ["all of it", "1 of 2 units", ""]
    rows = planned_stage_rows(again)
    assert rows[0].backward_s == pytest.approx(0.4 + 0.2)
    assert rows[0].kept_bytes < planned_stage_rows(plan)[0].kept_bytes


def test_a_cut_says_what_crosses_how_long_and_why() -> None:
    reason = CutReason(1, "1:add", "2:add", 8, 5.0, 2, "2:add", "3:add", 16, 5.5)
    first, second = cut_rows(replace(example(), cuts=(reason,)))
    assert (first.before, first.after, first.ranks) == ("layers.1.mlp", "layers.2.mlp", (0, 1))
    assert (first.crossing_bytes, first.transfer_s) == (8, 0.01)
    assert first.reason == "5.00 s"
    assert first.other == "1 unit later: 5.50 s, 16 B across"
    assert (second.reason, second.other) == ("", "")
    earlier = CutReason(3, "3:add", "4:add", 8, 5.0, 1, "1:add", "2:add", 16, 5.5)
    assert cut_rows(replace(example(), cuts=(earlier,)))[1].other == "2 units earlier: 5.50 s, 16 B across"
    only = CutReason(1, "1:add", "2:add", 8, 5.0)
    assert cut_rows(replace(example(), cuts=(only,)))[0].other == "no other place fits"


def test_a_cut_between_stages_of_one_rank_takes_no_time() -> None:
    plan = plan_stages(COSTS, 4, schedule="VHalf", cluster=Cluster(2, latency_s=1.0), microbatches=4)
    assert [cut.transfer_s for cut in cut_rows(plan)] == [1.0, 0.0, 1.0]


def test_memory_over_time_has_the_simulated_peaks() -> None:
    plan = example()
    step = simulate(schedule_of(plan), plan)
    lanes = memory_lanes(step, [None, 10.0, 20.0], divided_by=2.0)
    assert [lane.peak * 2 for lane in lanes] == list(step.peak_bytes)
    assert [lane.limit for lane in lanes] == [None, 10.0, 20.0]


def test_the_critical_path_adds_up_to_the_step() -> None:
    plan = example()
    step = simulate(schedule_of(plan), plan)
    shares = critical_shares(step)
    assert sum(seconds for _, seconds in shares) == pytest.approx(step.makespan_s)
    assert {"rank 0", "messages"} <= {what for what, _ in shares}
    assert [seconds for _, seconds in shares] == sorted((seconds for _, seconds in shares), reverse=True)


def test_of_many_ranks_the_rest_is_added_up() -> None:
    costs = CostModel(tuple(Unit(f"{n}", 1.0, 2.0) for n in range(16)), (0,) * 15)
    plan = plan_stages(costs, 16, microbatches=16)
    shares = critical_shares(simulate(get_schedule("1F1B")(16, 16), plan))
    assert len(shares) == 9
    assert shares[-1][0] == "8 others"
