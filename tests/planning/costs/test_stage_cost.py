from __future__ import annotations

from dataclasses import replace

import pytest

from partita.errors import PlanError
from partita.planning import ActionKind, Schedule, StageCost, simulate
from partita.planning.schedules.actions import PASS_KINDS


def test_half_of_the_backward_pass_is_for_the_inputs_unless_it_was_measured() -> None:
    assert StageCost(1.0, 4.0).seconds(ActionKind.I) == 2.0
    assert StageCost(1.0, 4.0, 1.0, 3.5).seconds(ActionKind.W) == 3.5


def test_w_keeps_everything_unless_it_was_measured() -> None:
    assert StageCost(1.0, 2.0, activation_bytes=8).weight_bytes == 8
    assert StageCost(1.0, 2.0, activation_bytes=8, weight_activation_bytes=3).weight_bytes == 3


def test_i_frees_what_w_does_not_need() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0I0,0I1,0F2,0W0,0W1,0I2,0W2\n")
    cost = StageCost(1.0, 2.0, activation_bytes=10, static_bytes=100)
    assert simulate(schedule, [cost]).peak_bytes == (130,)
    light = StageCost(1.0, 2.0, activation_bytes=10, static_bytes=100, weight_activation_bytes=2)
    assert simulate(schedule, [light]).peak_bytes == (120,)
    heavy = StageCost(1.0, 2.0, activation_bytes=10, static_bytes=100, weight_activation_bytes=9)
    assert simulate(schedule, [heavy]).peak_bytes == (128,)


def test_i_may_leave_more_to_w_than_was_kept() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n")
    cost = StageCost(1.0, 2.0, activation_bytes=10, weight_activation_bytes=25, backward_workspace_bytes=3)
    assert simulate(schedule, [cost]).peak_bytes == (53,)
    alone = Schedule.from_csv("0F0,0I0,0W0\n")
    assert simulate(alone, [replace(cost, backward_workspace_bytes=0)]).peak_bytes == (25,)


def test_two_passes_together_take_a_time_of_their_own() -> None:
    schedule = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert simulate(schedule, [StageCost(1.0, 2.0)]).makespan_s == 6.0
    assert simulate(schedule, [StageCost(1.0, 2.0, overlap_s=2.5)]).makespan_s == 5.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_activation_bytes": -1}, "weight_activation_bytes is -1"),
        ({"overlap_s": -1.0}, "overlap_s is -1.0"),
    ],
)
def test_a_cost_out_of_range_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        StageCost(1.0, 2.0, **options)  # type: ignore[arg-type]


def test_memory_during_and_after_each_pass() -> None:
    cost = StageCost(
        1.0,
        2.0,
        activation_bytes=10,
        weight_activation_bytes=7,
        forward_workspace_bytes=2,
        backward_workspace_bytes=3,
    )
    f, i, w, b = ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B
    assert [cost.bytes_during(kind) for kind in (f, i, w, b)] == [12, 3, 3, 3]
    assert [cost.bytes_after(kind) for kind in (f, i, w, b)] == [10, -3, -7, -10]


def test_an_input_pass_that_catches_more_than_it_frees_needs_that_while_it_runs() -> None:
    cost = StageCost(1.0, 2.0, activation_bytes=10, weight_activation_bytes=14, backward_workspace_bytes=3)
    assert cost.bytes_during(ActionKind.I) == 4 + 3
    assert replace(cost, recompute_bytes=6).bytes_during(ActionKind.I) == 6 + 3


def test_what_a_pass_takes_stands_at_its_number() -> None:
    cost = StageCost(1.0, 2.0, activation_bytes=8, weight_activation_bytes=3, backward_workspace_bytes=5)
    assert dict(zip(PASS_KINDS, cost.bytes_during_each, strict=True)) == {
        kind: cost.bytes_during(kind) for kind in (ActionKind.B, ActionKind.F, ActionKind.W, ActionKind.I)
    }
