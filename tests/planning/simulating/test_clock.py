"""The simulator's times against a step that is played through moment by moment."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from tests.planning.slow_simulator import SlowSimulator
from tests.planning.steps import Step, steps

from partita.errors import PlanError, ScheduleError
from partita.planning import (
    Action,
    ActionKind,
    Cluster,
    LinkLevel,
    Schedule,
    StageCost,
    get_schedule,
    simulate,
)
from partita.planning.simulating._clock import step_times


def by_text(spans: Iterable[tuple[int, Action, float, float]]) -> list[tuple[int, str, float, float]]:
    return sorted((rank, str(action), start, end) for rank, action, start, end in spans)


@given(steps(least=1))
@settings(max_examples=100, deadline=None)
def test_every_time_is_that_of_a_slow_simulator(step: Step) -> None:
    slow = SlowSimulator(step.schedule, step.costs, step.cluster, step.edges)
    end = slow.run()
    result = simulate(step.schedule, step.costs, step.cluster, step.edges)
    for spans, expected in ((result.spans, slow.passes), (result.collectives, slow.collectives)):
        mine = [(span.rank, span.action, span.start_s, span.end_s) for span in spans]
        assert by_text(mine) == by_text(expected)
    messages = [
        (span.action.kind, span.action.stage, span.action.other_stage, span.action.microbatch, span.start_s)
        for span in result.transfers
    ]
    assert sorted(messages) == sorted(
        (message.kind, message.sender, message.receiver, message.microbatch, message.start)
        for message in slow.messages
    )
    assert result.makespan_s == end


@given(steps())
@settings(max_examples=50, deadline=None)
def test_the_quick_way_says_the_same(step: Step) -> None:
    times = step_times(step.schedule, step.costs, step.cluster, step.edges)
    result = simulate(step.schedule, step.costs, step.cluster, step.edges)
    assert times.makespan_s == result.makespan_s
    assert times.busy_s == result.busy_s
    assert times.rank_span_s == result.rank_span_s


def test_ranks_of_a_node_wait_for_its_one_card() -> None:
    # Two pipelines of two stages, 0 -> 1 and 2 -> 3; ranks 0 and 2 are one node, 1 and 3 the other.
    schedule = Schedule("two", (0, 2, 1, 3), 1, tuple((Action(s, ActionKind.F, 0),) for s in (0, 2, 1, 3)))
    costs = [StageCost(1.0, 0.0, send_bytes=3)] * 4
    edges = [(0, 1), (2, 3)]
    alone = Cluster(4, 1.0)
    assert simulate(schedule, costs, alone, edges).makespan_s == 5.0
    card = Cluster.of_nodes(2, 2, LinkLevel(), LinkLevel(bandwidth_bytes_per_s=1.0, ports=1))
    result = simulate(schedule, costs, card, edges)
    assert [(span.start_s, span.end_s) for span in result.transfers] == [(1.0, 4.0), (4.0, 7.0)]
    assert result.makespan_s == 8.0


def test_a_fast_rank_takes_less_time_for_the_same_pass() -> None:
    schedule = get_schedule("GPipe")(2, 1)
    cluster = Cluster(2, speeds=(1.0, 4.0))
    result = simulate(schedule, [StageCost(4.0, 8.0, overlap_s=1.0)] * 2, cluster)
    assert [span.seconds for span in result.spans] == [4.0, 1.0, 2.0, 8.0]
    assert result.busy_s == (12.0, 3.0)


def test_an_unshard_runs_beside_passes_and_the_first_pass_of_its_stage_waits_for_it() -> None:
    #   passes        ....0F0 0F1 ..1F0 1F1
    #   collectives   [0U ][1U        ][0R ]
    row = "0UNSHARD,1UNSHARD,0F0,0F1,1F0,1F1,0REDUCE_GRAD\n"
    schedule = Schedule.from_csv(row)
    costs = [StageCost(2.0, 0.0, unshard_s=4.0, reduce_grad_s=9.0), StageCost(2.0, 0.0, unshard_s=6.0)]
    result = simulate(schedule, costs)
    assert [(span.start_s, span.end_s) for span in result.spans] == [(4, 6), (6, 8), (10, 12), (12, 14)]
    assert [(str(span.action), span.start_s, span.end_s) for span in result.collectives] == [
        ("0UNSHARD", 0, 4),
        ("1UNSHARD", 4, 10),
        ("0REDUCE_GRAD", 14, 23),
    ]
    assert (result.makespan_s, result.rank_span_s, result.busy_s) == (23, (10,), (8,))


def test_collectives_without_a_cost_change_nothing() -> None:
    schedule = Schedule.from_csv("0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n")
    result = simulate(schedule, [StageCost(1.0, 2.0)])
    assert (result.makespan_s, result.collectives) == (3.0, ())


def test_a_fresh_unshard_is_waited_for_again() -> None:
    schedule = Schedule.from_csv("0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0\n")
    result = simulate(schedule, [StageCost(1.0, 2.0, unshard_s=3.0)])
    assert [(span.start_s, span.end_s) for span in result.spans] == [(3, 4), (7, 9)]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            Schedule("x", (0, 1), 1, ((Action(1, ActionKind.F, 0),), ())),
            "rank 0 has 1F0, whose stage it has n",
        ),
        (Schedule("x", (0,), 1, ((Action(3, ActionKind.F, 0),),)), "rank 0 has 3F0, whose stage it has not"),
        (Schedule("x", (0,), 1, ((Action(0, ActionKind.F, 1),),)), "rank 0 has 0F1: microbatches are 0 to 0"),
        (
            Schedule("x", (0, 1, 2), 1, ((Action(0, ActionKind.SEND_F, 0, peer=2),), (), ())),
            "rank 0 has 0SEND_F0>2, and no edge goes to stage 2 from there",
        ),
        (Schedule.from_csv("0W0\n"), r"rank 0 waits at action 0 \(0W0\) for 0B0 \(or I\), for ever"),
        (
            Schedule.from_csv("\n1F0\n", stage_ranks=(0, 1)),
            r"rank 1 waits at action 0 \(1F0\) for 0SEND_F0 to",
        ),
    ],
)
def test_an_impossible_order_is_an_error(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(schedule, [StageCost(1.0, 1.0)] * schedule.stages)


def test_a_cluster_with_fewer_ranks_than_the_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="the schedule has 2 ranks, the cluster 1: give it as many"):
        step_times(get_schedule("GPipe")(2, 2), [StageCost(1.0, 1.0)] * 2, Cluster(1))
