from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.planning.steps import Step, steps

from partita.planning import (
    ActionKind,
    Cluster,
    LinkLevel,
    Schedule,
    Simulation,
    StageCost,
    get_schedule,
    simulate,
)


def run(step: Step) -> Simulation:
    return simulate(step.schedule, step.costs, step.cluster, step.edges)


def names(result: Simulation) -> str:
    return " ".join(str(span.action) for span in result.critical_path)


@given(steps())
@settings(max_examples=80, deadline=None)
def test_the_path_goes_from_the_start_of_the_step_to_its_end_without_a_gap(step: Step) -> None:
    result = run(step)
    path = result.critical_path
    assert path[0].start_s == 0.0
    assert path[-1].end_s == result.makespan_s
    assert all(before.end_s == after.start_s for before, after in pairwise(path))
    assert sum(span.seconds for span in path) == result.makespan_s


@given(steps())
@settings(max_examples=50, deadline=None)
def test_everything_starts_when_something_else_ends_or_with_the_step(step: Step) -> None:
    result = run(step)
    for span in (*result.spans, *result.transfers, *result.collectives):
        cause = result._causes.of(span)
        assert span.start_s == (0.0 if cause is None else cause.end_s)


@given(steps())
@settings(max_examples=50, deadline=None)
def test_a_rank_is_busy_or_waits_until_it_is_done(step: Step) -> None:
    result = run(step)
    ends = [
        max((s.end_s for s in result.spans if s.rank == rank), default=0.0)
        for rank in range(len(result.busy_s))
    ]
    for rank, (busy_s, end_s) in enumerate(zip(result.busy_s, ends, strict=True)):
        waited_s = sum(wait.end_s - wait.start_s for wait in result.idle_times if wait.rank == rank)
        assert busy_s + waited_s == end_s
    assert all(wait.cause.end_s == wait.end_s for wait in result.idle_times)
    assert all(wait.cause.action.is_send or wait.cause.rank == wait.rank for wait in result.idle_times)


def slowed(step: Step, stage: int, kind: ActionKind, factor: float) -> Step:
    """The same with one kind of pass of one stage taking `factor` times as long."""
    cost = step.costs[stage]
    halves = {
        ActionKind.I: cost.seconds(ActionKind.I) - cost.recompute_s,
        ActionKind.W: cost.seconds(ActionKind.W),
    }
    changed = replace(cost, backward_input_s=halves[ActionKind.I], backward_weight_s=halves[ActionKind.W])
    name = {
        ActionKind.F: "forward_s",
        ActionKind.B: "backward_s",
        ActionKind.I: "backward_input_s",
        ActionKind.W: "backward_weight_s",
    }[kind]
    changed = replace(changed, **{name: getattr(changed, name) * factor})
    costs = (*step.costs[:stage], changed, *step.costs[stage + 1 :])
    return replace(step, costs=costs)


@given(steps(least=1), st.data())
@settings(max_examples=50, deadline=None)
def test_what_is_not_on_the_path_may_be_faster_and_nothing_changes(step: Step, data: st.DataObject) -> None:
    """Not with links that are shared: there, what is earlier may get in the way of what decides."""
    step = replace(step, cluster=Cluster(step.schedule.ranks, 1.0, 1.0))
    result = run(step)
    parts = {(p.stage, p.kind) for span in result.critical_path for p in span.action.passes}
    every = {(p.stage, p.kind) for span in result.spans for p in span.action.passes}
    assume(every - parts)
    stage, kind = data.draw(st.sampled_from(sorted(every - parts)))
    assert run(slowed(step, stage, kind, 0.5)).makespan_s == result.makespan_s
    assert run(slowed(step, stage, kind, 0.0)).makespan_s == result.makespan_s


@given(steps(least=1), st.data())
@settings(max_examples=50, deadline=None)
def test_what_is_on_the_path_makes_the_step_longer(step: Step, data: st.DataObject) -> None:
    step = replace(step, cluster=Cluster(step.schedule.ranks, 1.0, 1.0))
    step = replace(step, costs=tuple(replace(cost, overlap_s=None) for cost in step.costs))
    result = run(step)
    path = [p for span in result.critical_path for p in span.action.passes]
    one = data.draw(st.sampled_from(path))
    longer = run(slowed(step, one.stage, one.kind, 2.0))
    count = sum((p.stage, p.kind) == (one.stage, one.kind) for p in path)
    changed_s = step.costs[one.stage].seconds(one.kind)
    if one.kind in (ActionKind.B, ActionKind.I):
        changed_s -= step.costs[one.stage].recompute_s
    assert longer.makespan_s >= result.makespan_s + count * changed_s


def test_shortening_the_one_path_shortens_the_step() -> None:
    schedule = get_schedule("1F1B")(3, 4)
    costs = [StageCost(1.0, 2.0), StageCost(2.5, 5.0), StageCost(1.0, 2.0)]
    before = simulate(schedule, costs)
    assert {span.action.stage for span in before.critical_path} == {0, 1, 2}
    after = simulate(schedule, [costs[0], StageCost(2.0, 5.0), costs[2]])
    shorter = sum(str(span.action).startswith("1F") for span in before.critical_path)
    assert after.makespan_s == before.makespan_s - 0.5 * shorter


def test_a_slow_link_is_on_the_path_with_its_messages() -> None:
    schedule = get_schedule("GPipe")(2, 2)
    costs = [StageCost(1.0, 1.0, send_bytes=10)] * 2
    result = simulate(schedule, costs, Cluster(2, 1.0))
    # GPipe goes back in order: each second message waits for the first one of its way.
    assert names(result) == "0F0 0SEND_F0 0SEND_F1 1F1 1B0 1SEND_B0 1SEND_B1 0B1"
    assert result.makespan_s == sum(span.seconds for span in result.critical_path)


def test_a_message_that_waits_for_a_shared_card_names_the_one_before_it() -> None:
    schedule = Schedule.from_csv("0F0\n2F0\n1F0\n3F0\n", stage_ranks=(0, 2, 1, 3))
    costs = [StageCost(1.0, 0.0, send_bytes=3)] * 4
    card = Cluster.of_nodes(2, 2, LinkLevel(), LinkLevel(bandwidth_bytes_per_s=1.0, ports=1))
    result = simulate(schedule, costs, card, [(0, 1), (2, 3)])
    assert names(result) == "0F0 0SEND_F0 2SEND_F0 3F0"
    assert [str(wait.cause.action) for wait in result.idle_times] == ["0SEND_F0", "2SEND_F0"]


def test_a_step_may_end_with_its_gradients_reduced() -> None:
    schedule = Schedule.from_csv("0UNSHARD,0F0,0B0,0REDUCE_GRAD\n")
    result = simulate(schedule, [StageCost(1.0, 2.0, unshard_s=3.0, reduce_grad_s=4.0)])
    assert names(result) == "0UNSHARD 0F0 0B0 0REDUCE_GRAD"
    assert [span.seconds for span in result.critical_path] == [3.0, 1.0, 2.0, 4.0]
    (wait,) = result.idle_times
    assert (wait.rank, wait.start_s, wait.end_s, str(wait.action)) == (0, 0.0, 3.0, "0F0")
    assert str(wait.cause.action) == "0UNSHARD"


def test_nothing_to_do_has_no_path() -> None:
    result = simulate(Schedule("none", (0,), 1, ((),)), [StageCost(1.0, 1.0)])
    assert (result.critical_path, result.idle_times, result.makespan_s) == ((), (), 0.0)
