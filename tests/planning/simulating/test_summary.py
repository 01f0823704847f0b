"""The summary of a step says what its simulation says."""

from __future__ import annotations

import gc

from hypothesis import given, settings
from tests.planning.steps import Step, steps

from partita.planning import CostModel, Schedule, Unit, plan_stages, schedule_of, simulate
from partita.planning.simulating.simulate import Simulation
from partita.planning.simulating.summary import StepSummary, step_summary


def numbers(of: Simulation | StepSummary) -> tuple[object, ...]:
    return of.makespan_s, of.bubble, of.peak_bytes, of.span_s, of.span_bubble


@given(steps())
@settings(max_examples=50, deadline=None)
def test_every_number_is_that_of_the_simulation(step: Step) -> None:
    edges = [(stage, stage + 1) for stage in range(step.schedule.stages - 1)]
    schedule = step.schedule if step.edges == tuple(edges) else step.schedule.compute_only()
    summary = step_summary(schedule, step.costs, step.cluster)
    assert numbers(summary) == numbers(simulate(schedule, step.costs, step.cluster))


def test_of_a_plan_too() -> None:
    plan = plan_stages(CostModel(tuple(Unit(name, 1.0, 2.0) for name in "abcd"), (8, 8, 8)), 2)
    assert numbers(step_summary(schedule_of(plan), plan)) == numbers(simulate(schedule_of(plan), plan))


def test_an_empty_step_takes_no_time() -> None:
    schedule = Schedule("none", (0,), 1, ((),))
    plan = plan_stages(CostModel((Unit("a", 1.0, 2.0),), ()), 1)
    assert step_summary(schedule, plan).makespan_s == 0.0


def test_the_search_for_cycles_is_as_it_was_afterwards() -> None:
    plan = plan_stages(CostModel((Unit("a", 1.0, 2.0),), ()), 1)
    assert gc.isenabled()
    step_summary(schedule_of(plan), plan)
    assert gc.isenabled()
    gc.disable()
    try:
        step_summary(schedule_of(plan), plan)
        assert not gc.isenabled()
    finally:
        gc.enable()
