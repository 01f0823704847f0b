from __future__ import annotations

import json
from dataclasses import replace

import pytest

from partita.errors import PlanError
from partita.planning import (
    Cluster,
    CostModel,
    Plan,
    TiedUnits,
    Unit,
    plan_stages,
    reduced_tied_gradients,
    search,
)

COSTS = CostModel(
    tuple(
        Unit(f"u{i}", float(i + 1), 2.0, parameters=i, parameter_bytes=4 * i, modules=(f"m{i}",))
        for i in range(6)
    ),
    (10, 20, 30, 40, 50),
)


def plan(stages: int = 3, **options: object) -> Plan:
    return plan_stages(COSTS, stages, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("cluster", [None, Cluster(3), Cluster(2, 1e3, 0.1, 10**6)])
def test_a_plan_survives_json(cluster: Cluster | None) -> None:
    made = plan(cluster=cluster)
    assert Plan.from_json(made.to_json()) == made


def test_a_plan_for_one_sum_a_step_of_tied_gradients_says_so() -> None:
    tied = replace(COSTS, tied=(TiedUnits((1, 5), 4, gradient_bytes=4),))
    exact, reduced = (plan_stages(costs, 3) for costs in (tied, reduced_tied_gradients(tied)))
    assert (exact.tied_gradients, reduced.tied_gradients) == ("exact", "reduced")
    assert Plan.from_json(reduced.to_json()) == reduced
    assert "tied_gradients: exact -> reduced" in map(str, exact.difference(reduced))
    assert search(reduced_tied_gradients(tied), Cluster(2))[0].plan.tied_gradients == "reduced"
    with pytest.raises(PlanError, match="tied_gradients is 'never': give exact or reduced"):
        replace(exact, tied_gradients="never")


@pytest.mark.parametrize("pair", [[0], [0, 8, 9]])
def test_a_file_with_a_pair_that_is_none_is_refused(pair: list[int]) -> None:
    """It was read, and the simulator ended in a ValueError."""
    saved = json.loads(plan().to_json())
    saved["stages"][2]["tied_gradients"] = [pair]
    message = rf"Plan.stages\[2\].tied_gradients\[0\] is a list of {len(pair)}: give 2 values, or save it"
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(saved))


def test_a_table_has_one_row_a_stage() -> None:
    rows = plan().rows()
    assert [row["stage"] for row in rows] == [0, 1, 2]
    assert sum(row["parameters"] for row in rows) == 15  # type: ignore[misc]
    assert [module for row in rows for module in row["modules"]] == [f"m{i}" for i in range(6)]  # type: ignore[attr-defined]


def test_equal_plans_have_no_difference() -> None:
    assert plan().difference(plan()) == ()


def test_a_difference_names_the_setting_that_changed() -> None:
    changes = plan(microbatches=8).difference(plan(microbatches=9))
    assert [str(change) for change in changes] == ["microbatches: 8 -> 9"]


def test_a_difference_names_the_units_that_moved() -> None:
    before, after = plan(2), plan(3)
    moved = {
        c.what: (c.before, c.after) for c in before.difference(after) if c.what.startswith("stage of unit")
    }
    was, now = before.stage_of(), after.stage_of()
    assert moved == {
        f"stage of unit {name}": (was[name], now[name]) for name in was if was[name] != now[name]
    }
    assert moved


def test_stages_out_of_order_are_refused() -> None:
    made = plan(2)
    with pytest.raises(PlanError, match="stage 1 stands at place 0: list the stages in order"):
        replace(made, stages=made.stages[::-1])


def test_a_gap_between_stages_is_refused() -> None:
    made = plan(3)
    stages = (made.stages[0], replace(made.stages[2], index=1))
    with pytest.raises(PlanError, match=f"stage 1 starts at unit {stages[1].first_unit}"):
        replace(made, stages=stages, placement=(0, 1))


def test_a_placement_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(PlanError, match="placement has 1 ranks for 2 stages: give one a stage"):
        replace(plan(2), placement=(0,))


def test_a_stage_must_name_its_units() -> None:
    with pytest.raises(PlanError, match="stage 0 names 1 units, but goes from 0 to"):
        replace(plan(2).stages[0], units=("u0",))


def test_a_stage_must_have_a_unit() -> None:
    with pytest.raises(
        PlanError, match="stage 0 goes from unit 3 to 2: give first_unit 0 or more, and last_unit at"
    ):
        replace(plan(2).stages[0], first_unit=3, last_unit=2)


def test_seconds_that_no_float_can_hold_are_refused() -> None:
    with pytest.raises(PlanError, match=r"bottleneck_s is 10+: give a finite number of seconds"):
        replace(plan(), bottleneck_s=10**400)


@pytest.mark.parametrize(
    ("what", "to", "advice"),
    [
        ("sent_values", 0, "later"),
        ("sent_values", 9, "later"),
        ("handed_gradients", 1, "earlier"),
        ("tied_gradients", 2, "earlier"),
    ],
)
def test_a_plan_refuses_messages_to_stages_that_can_not_take_them(what: str, to: int, advice: str) -> None:
    """They ended in an IndexError of the simulator."""
    plan = plan_stages(CostModel((Unit("a", 1.0, 2.0), Unit("b", 1.0, 2.0)), (4,)), 2)
    data = json.loads(plan.to_json())
    data["stages"][1][what] = [[to, 8]]
    with pytest.raises(PlanError, match=f"{what} of stage 1 names stage {to}, of 2: give {advice} ones"):
        Plan.from_json(json.dumps(data))


def test_a_plan_from_before_there_were_messages_past_stages_loads() -> None:
    plan = plan_stages(CostModel((Unit("a", 1.0, 2.0), Unit("b", 1.0, 2.0)), (4,)), 2)
    data = json.loads(plan.to_json())
    for stage in data["stages"]:
        del stage["sent_values"]
    assert Plan.from_json(json.dumps(data)) == plan
