from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from tests.planning.steps import Step, steps

from partita.errors import PlanError
from partita.planning import Schedule, Simulation, StageCost, get_schedule, simulate


def levels(text: str, *costs: StageCost, rank: int = 0) -> list[tuple[float, int]]:
    return [tuple(step) for step in simulate(Schedule.from_csv(text), costs).memory[rank]]


@given(steps())
@settings(max_examples=50, deadline=None)
def test_the_most_over_time_is_the_peak(step: Step) -> None:
    result = simulate(step.schedule, step.costs, step.cluster, step.edges)
    assert tuple(max(size for _, size in rank) for rank in result.memory) == result.peak_bytes


@given(steps())
@settings(max_examples=30, deadline=None)
def test_a_step_ends_with_what_is_always_there_and_time_only_goes_on(step: Step) -> None:
    result = simulate(step.schedule, step.costs, step.cluster, step.edges)
    for rank, changes in enumerate(result.memory):
        static = sum(
            cost.static_bytes
            for cost, at in zip(step.costs, step.schedule.stage_ranks, strict=True)
            if at == rank
        )
        assert changes[0] == (0.0, static)
        assert changes[-1].bytes == static
        assert all(before.time_s <= after.time_s for before, after in pairwise(changes))
        assert all(before.bytes != after.bytes for before, after in pairwise(changes))


def test_a_pass_needs_its_workspace_while_it_runs() -> None:
    cost = StageCost(
        1.0,
        2.0,
        activation_bytes=10,
        static_bytes=100,
        forward_workspace_bytes=3,
        backward_workspace_bytes=5,
    )
    assert levels("0F0,0B0\n", cost) == [(0.0, 100), (0.0, 113), (1.0, 110), (1.0, 115), (3.0, 100)]


def test_i_frees_what_w_does_not_need() -> None:
    cost = StageCost(1.0, 2.0, activation_bytes=10, weight_activation_bytes=4)
    assert levels("0F0,0F1,0I0,0W0,0I1,0W1\n", cost) == [
        (0.0, 0),
        (0.0, 10),
        (1.0, 20),
        (3.0, 14),
        (4.0, 10),
        (5.0, 4),
        (6.0, 0),
    ]


def test_what_is_computed_again_is_there_from_the_start_of_the_backward_pass() -> None:
    cost = StageCost(2.0, 2.0, activation_bytes=1, recompute_s=2.0, recompute_bytes=9)
    assert levels("0F0,0B0\n", cost) == [(0.0, 0), (0.0, 1), (2.0, 10), (6.0, 0)]


def test_a_forward_pass_alone_keeps_nothing() -> None:
    steps = levels("0F0,0F1\n", StageCost(1.0, 2.0, activation_bytes=8))
    assert steps == [(0.0, 0), (0.0, 8), (1.0, 0), (1.0, 8), (2.0, 0)]


def test_memory_waits_with_its_rank() -> None:
    schedule = get_schedule("1F1B")(2, 1)
    result = simulate(schedule, [StageCost(1.0, 2.0, activation_bytes=10)] * 2)
    assert result.memory == (
        ((0.0, 0), (0.0, 10), (6.0, 0)),
        ((0.0, 0), (1.0, 10), (4.0, 0)),
    )


def test_a_simulation_that_does_not_say_what_was_simulated_has_none() -> None:
    result = Simulation(1.0, (1.0,), 0.0, (0,), (), ())
    with pytest.raises(PlanError, match="the simulation does not say what was simulated: simulate again"):
        _ = result.memory
    with pytest.raises(PlanError, match="simulate again"):
        _ = result.critical_path
