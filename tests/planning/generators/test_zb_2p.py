"""What the automatic schedule makes of times, links and memory."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import ScheduleError
from partita.planning import Cluster, Schedule, StageCost, get_schedule, simulate, validate
from partita.planning.generators.making.list_scheduler import (
    ListScheduler,
    Outcome,
    Rule,
    Rules,
    least_capacity,
)
from partita.planning.generators.making.problem import scheduling_problem
from partita.planning.generators.zb_h1 import zb_h1

seconds = st.floats(0.25, 4.0)
ZB2P = get_schedule("ZB2p")


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, list[StageCost], Cluster]:
    """Ranks, microbatches, uneven stages (one or two a rank), and a cluster."""
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    costs = []
    for _ in range(ranks * chunks):
        forward, input_s, weight = draw(seconds), draw(seconds), draw(seconds)
        kept = draw(st.integers(0, 9))
        costs.append(
            StageCost(
                forward,
                input_s + weight,
                input_s,
                weight,
                send_bytes=draw(st.integers(0, 2)),
                activation_bytes=kept,
                static_bytes=draw(st.integers(0, 5)),
                weight_activation_bytes=draw(st.integers(0, kept)),
            )
        )
    cluster = draw(st.sampled_from([Cluster(ranks), Cluster(ranks, 8.0, 0.1), Cluster(ranks, 1.0)]))
    return ranks, draw(st.integers(1, 12)), costs, cluster


def made(
    ranks: int, microbatches: int, costs: list[StageCost], cluster: Cluster, memory: int | None
) -> Schedule:
    return ZB2P(len(costs), microbatches, ranks, costs=costs, cluster=cluster, memory_bytes=memory)


@given(problems(), st.floats(0.0, 8.0))
@settings(max_examples=30, deadline=None)
def test_only_what_takes_too_long_is_given_up(problem, idle_s: float) -> None:  # type: ignore[no-untyped-def]
    ranks, microbatches, costs, cluster = problem
    placement = tuple(stage % ranks for stage in range(len(costs)))
    to_do = scheduling_problem(costs, placement, microbatches, cluster)
    outcome = ListScheduler(to_do, Rule(idle_s)).run()
    assert ListScheduler(to_do, Rule(idle_s)).run_within(outcome.span_s) == outcome
    assert ListScheduler(to_do, Rule(idle_s)).run_within(outcome.span_s * 0.999) is None


@given(problems(), st.integers(0, 40), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_rule_that_is_not_run_gives_a_schedule_that_was_made(problem, memory: int, late: bool) -> None:  # type: ignore[no-untyped-def]
    """In little memory a rank waits for that alone, and 96 rules of a search gave eight schedules."""
    ranks, microbatches, costs, cluster = problem
    placement = tuple(stage % ranks for stage in range(len(costs)))
    to_do = scheduling_problem(costs, placement, microbatches, cluster)
    to_do = replace(to_do, capacity=tuple(least + memory for least in least_capacity(to_do)))
    rules, outcomes = Rules(to_do), list[Outcome]()
    for step in range(24):
        rule = Rule(8.0 * 0.8**step, target_s=microbatches * 3.0 if late else math.inf)
        outcome = rules.run(rule)
        if outcome is None:
            assert ListScheduler(to_do, rule).run() in outcomes
        else:
            assert outcome == ListScheduler(to_do, rule).run()
            outcomes.append(outcome)
    assert len(outcomes) < 24


@given(problems())
@settings(max_examples=80, deadline=None)
def test_no_zero_bubble_schedule_made_by_hand_has_a_shorter_span(problem) -> None:  # type: ignore[no-untyped-def]
    ranks, microbatches, costs, cluster = problem
    schedule = made(*problem, None)
    validate(schedule)
    span = simulate(schedule, costs, cluster).span_s
    for name in ("ZBH1", "ZBH2", "InterleavedZeroBubble"):
        other = simulate(get_schedule(name)(len(costs), microbatches, ranks), costs, cluster)
        assert span <= other.span_s * (1 + 1e-6), name


@given(problems(), st.floats(1.0, 3.0))
@settings(max_examples=80, deadline=None)
def test_no_rank_holds_more_than_its_memory(problem, share: float) -> None:  # type: ignore[no-untyped-def]
    ranks, microbatches, costs, cluster = problem
    least = [0] * ranks
    for stage, cost in enumerate(costs):
        least[stage % ranks] += cost.static_bytes + cost.activation_bytes
    memory = int(share * max(least))
    schedule = made(ranks, microbatches, costs, cluster, memory)
    validate(schedule)
    assert max(simulate(schedule, costs, cluster).peak_bytes) <= memory


def test_the_memory_of_the_cluster_counts() -> None:
    costs = [StageCost(1.0, 2.0, activation_bytes=1)] * 4
    schedule = ZB2P(4, 12, costs=costs, cluster=Cluster(4, memory_bytes=3))
    assert max(simulate(schedule, costs).peak_bytes) == 3


def test_too_little_memory_says_how_much_is_enough() -> None:
    costs = [StageCost(1.0, 2.0, activation_bytes=7, static_bytes=5)] * 2
    with pytest.raises(
        ScheduleError,
        match=r"11 bytes a rank: rank 0 takes 5 bytes all the time and 7 for a microbatch; give at least 12",
    ):
        ZB2P(2, 4, costs=costs, memory_bytes=11)
    assert ZB2P(2, 4, costs=costs, memory_bytes=12).in_flight() == (1, 1)


def test_one_cost_a_stage_is_needed() -> None:
    with pytest.raises(ScheduleError, match="ZB2p with 1 costs for 2 stages: give one a stage"):
        ZB2P(2, 4, costs=[StageCost(1.0, 2.0)])


def test_the_cluster_must_have_the_ranks() -> None:
    with pytest.raises(ScheduleError, match="ZB2p on 2 ranks, with a cluster of 1: give it as many"):
        ZB2P(2, 4, cluster=Cluster(1))


def test_what_w_keeps_makes_a_difference() -> None:
    """Where I frees most, a rank can put W off for longer in the same memory."""
    spans = []
    for left in (10, 3):
        costs = [StageCost(2.0, 3.0, 2.0, 1.0, activation_bytes=10, weight_activation_bytes=left)] * 6
        schedule = ZB2P(6, 24, costs=costs, memory_bytes=90)
        spans.append(simulate(schedule, costs).span_s)
    assert spans[1] < spans[0]


def test_costs_make_no_difference_to_schedules_that_know_none() -> None:
    kind = get_schedule("1F1B")
    assert kind(2, 4, costs=[StageCost(1.0, 9.0)] * 2, cluster=Cluster(2), memory_bytes=1) == kind(2, 4)


def test_passes_that_take_no_time_can_be_scheduled() -> None:
    validate(ZB2P(3, 5, costs=[StageCost(0.0, 0.0)] * 3))


@given(st.integers(1, 8), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_without_costs_it_holds_no_more_than_twice_the_ranks(ranks: int, microbatches: int) -> None:
    schedule = ZB2P(ranks, microbatches)
    assert max(schedule.in_flight()) <= 2 * ranks
    if microbatches >= 2 * ranks:
        assert simulate(schedule, [StageCost(1.0, 2.0)] * ranks).span_s == 3 * microbatches


def test_what_i_leaves_may_be_more_than_was_kept() -> None:
    """Recomputed stages keep little, and W needs all of it: too little memory was taken for enough once."""
    cost = StageCost(
        1.0, 2.0, activation_bytes=2, weight_activation_bytes=7, recompute_bytes=6, recompute_s=1.0
    )
    with pytest.raises(ScheduleError, match="give at least 8"):
        ZB2P(2, 4, costs=[cost] * 2, memory_bytes=6)
    for memory in (8, 9, 20, None):
        schedule = ZB2P(2, 4, costs=[cost] * 2, memory_bytes=memory)
        assert memory is None or max(simulate(schedule, [cost] * 2).peak_bytes) <= memory


def test_each_rank_has_its_own_memory() -> None:
    costs = [StageCost(1.0, 2.0, activation_bytes=1)] * 2
    schedule = ZB2P(2, 8, costs=costs, cluster=Cluster(2, memories=(2, 5)))
    assert simulate(schedule, costs).peak_bytes[0] <= 2


def test_schedules_made_by_hand_are_made_once_for_several_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two times of the same stages: a third of what ZB2p took was to make the same three schedules again.
    module = importlib.import_module("partita.planning.generators.zb_2p")
    module._handmade.cache_clear()
    calls = []

    def counted(*args: object, **kwargs: object) -> Schedule:
        calls.append(args)
        return zb_h1(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "zb_h1", counted)
    for input_s in (0.5, 1.5):
        costs = [StageCost(1.0, input_s + 1.0, input_s, 1.0)] * 3
        ZB2P(3, 5, costs=costs)
    module._handmade.cache_clear()
    assert len(calls) == 1
