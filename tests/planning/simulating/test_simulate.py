from __future__ import annotations

import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import PlanError, ScheduleError
from partita.planning import (
    ActionKind,
    Cluster,
    CostModel,
    Schedule,
    Simulation,
    StageCost,
    Unit,
    get_schedule,
    lower,
    plan_stages,
    schedule_names,
    simulate,
)

times = st.integers(0, 8).map(float)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, list[StageCost], Cluster]:
    ranks, name = draw(st.integers(1, 4)), draw(st.sampled_from(schedule_names()))
    schedule = get_schedule(name)(2 * ranks, 2 * ranks + draw(st.integers(0, 5)), ranks)
    costs = [
        StageCost(
            draw(times),
            draw(times),
            send_bytes=draw(st.integers(0, 5)),
            activation_bytes=draw(st.integers(0, 5)),
        )
        for _ in range(schedule.stages)
    ]
    return (
        schedule,
        costs,
        draw(
            st.sampled_from([Cluster(ranks), Cluster(ranks, 1.0), Cluster(ranks, 2.0, 3.0, overhead_s=1.0)])
        ),
    )


@given(
    st.sampled_from(["GPipe", "1F1B"]),
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_the_bubble_of_equal_stages_is_the_textbooks(
    name: str, p: int, m: int, forward: int, backward: int
) -> None:
    result = simulate(get_schedule(name)(p, m), [StageCost(float(forward), float(backward))] * p)
    assert result.makespan_s == (m + p - 1) * (forward + backward)
    idle = 1 - Fraction(sum(result.busy_s)) / (p * Fraction(result.makespan_s))
    assert idle == Fraction(p - 1, m + p - 1)
    assert result.bubble == pytest.approx(float(idle), abs=1e-12)


@given(runs())
@settings(max_examples=200, deadline=None)
def test_no_step_is_faster_than_its_longest_chain_or_its_busiest_rank(run) -> None:  # type: ignore[no-untyped-def]
    schedule, costs, cluster = run
    result = simulate(schedule, costs, cluster)
    trains = schedule.has_backward
    there_and_back = sum(cost.forward_s for cost in costs)
    if trains:
        # The last W of stage 0 may come later, but its I can't come before all of the others.
        split = any(part.kind is ActionKind.I for _, part in schedule.passes())
        there_and_back += sum(cost.backward_s / 2 if split else cost.backward_s for cost in costs)
    for stage, (here, after) in enumerate(zip(schedule.stage_ranks, schedule.stage_ranks[1:], strict=False)):
        if here != after:
            there_and_back += cluster.transfer_s(costs[stage].send_bytes) * (2 if trains else 1)
    assert result.makespan_s >= there_and_back
    assert result.makespan_s >= max(result.busy_s)


@given(runs())
@settings(max_examples=100, deadline=None)
def test_a_rank_does_one_thing_at_a_time_and_so_does_a_link(run) -> None:  # type: ignore[no-untyped-def]
    schedule, costs, cluster = run
    result = simulate(schedule, costs, cluster)
    ends: dict[object, float] = {}
    for span in result.spans:
        assert span.start_s >= ends.get(span.rank, 0.0)
        ends[span.rank] = span.end_s
    for span in result.transfers:
        link = (span.rank, schedule.stage_ranks[span.action.other_stage], "link")
        assert span.start_s >= ends.get(link, 0.0)
        ends[link] = span.end_s


@given(runs())
@settings(max_examples=100, deadline=None)
def test_faster_links_never_slow_a_pipeline_in_a_row_down(run) -> None:  # type: ignore[no-untyped-def]
    schedule, costs, _ = run
    slow, fast = Cluster(schedule.ranks, 1.0, 1.0), Cluster(schedule.ranks)
    assert simulate(schedule, costs, fast).makespan_s <= simulate(schedule, costs, slow).makespan_s


@given(runs())
@settings(max_examples=100, deadline=None)
def test_writing_communication_out_changes_no_time(run) -> None:  # type: ignore[no-untyped-def]
    schedule, costs, cluster = run
    assert simulate(lower(schedule), costs, cluster) == simulate(schedule, costs, cluster)


@given(runs())
@settings(max_examples=30, deadline=None)
def test_a_simulation_survives_json(run) -> None:  # type: ignore[no-untyped-def]
    result = simulate(*run)
    assert Simulation.from_json(result.to_json()) == result


def test_a_transfer_runs_beside_compute() -> None:
    # rank 0   0F0 0F1 0F2
    # link         ==0 ==1 ==2
    # rank 1           1F0 1F1 1F2
    schedule = get_schedule("ForwardOnly")(2, 3)
    costs = [StageCost(1.0, 0.0, send_bytes=1), StageCost(1.0, 0.0)]
    assert simulate(schedule, costs, Cluster(2, 1.0)).makespan_s == 5.0


def test_a_link_carries_one_message_at_a_time() -> None:
    schedule = get_schedule("ForwardOnly")(2, 3)
    costs = [StageCost(1.0, 0.0, send_bytes=4), StageCost(1.0, 0.0)]
    result = simulate(schedule, costs, Cluster(2, 1.0))
    assert [(span.start_s, span.end_s) for span in result.transfers] == [(1.0, 5.0), (5.0, 9.0), (9.0, 13.0)]
    assert result.makespan_s == 14.0


def test_a_gradient_is_as_large_as_what_came_unless_its_size_is_given() -> None:
    schedule = get_schedule("GPipe")(2, 1)
    first = StageCost(1.0, 1.0, send_bytes=5)
    assert simulate(schedule, [first, StageCost(1.0, 1.0)], Cluster(2, 1.0)).makespan_s == 14.0
    assert (
        simulate(schedule, [first, StageCost(1.0, 1.0, send_grad_bytes=2)], Cluster(2, 1.0)).makespan_s
        == 11.0
    )


def test_half_of_the_backward_pass_is_for_the_inputs_unless_it_was_measured() -> None:
    schedule = Schedule.from_csv("0F0,0I0,0W0\n")
    ends = [span.end_s for span in simulate(schedule, [StageCost(1.0, 4.0)]).spans]
    assert ends == [1.0, 3.0, 5.0]
    ends = [span.end_s for span in simulate(schedule, [StageCost(1.0, 4.0, 1.0, 3.5)]).spans]
    assert ends == [1.0, 2.0, 5.5]


def test_memory_is_what_stays_and_what_is_in_flight() -> None:
    costs = [StageCost(1.0, 1.0, activation_bytes=10, static_bytes=100 * (stage + 1)) for stage in range(3)]
    assert simulate(get_schedule("1F1B")(3, 8), costs).peak_bytes == (130, 220, 310)
    assert simulate(get_schedule("GPipe")(3, 8), costs).peak_bytes == (180, 280, 380)
    assert simulate(get_schedule("ForwardOnly")(3, 8), costs).peak_bytes == (110, 210, 310)


def test_a_plan_brings_its_costs_and_its_cluster() -> None:
    units = tuple(Unit(f"u{index}", 1.0, 2.0, parameter_bytes=10, activation_bytes=1) for index in range(4))
    plan = plan_stages(CostModel(units, (8, 8, 8)), 2, cluster=Cluster(2, 8.0), microbatches=3)
    result = simulate(get_schedule(plan.schedule)(2, 3), plan)
    assert max(result.busy_s) == 18.0
    assert {span.end_s - span.start_s for span in result.transfers} == {1.0}
    assert result.peak_bytes == tuple(stage.peak_bytes for stage in plan.stages)


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=6, max_size=12), st.sampled_from([0, 4]))
@settings(max_examples=100, deadline=None)
def test_a_full_pipeline_takes_the_planned_bottleneck_for_each_microbatch(
    stages: int, sizes: list[int], sent: int
) -> None:
    units = tuple(Unit(f"u{index}", float(size), float(size)) for index, size in enumerate(sizes))
    costs = CostModel(units, (sent,) * (len(units) - 1))
    for name in ("ForwardOnly", "GPipe", "1F1B"):
        plan = plan_stages(costs, stages, schedule=name, cluster=Cluster(stages, 1.0))
        few, many = (simulate(get_schedule(name)(stages, count), plan).makespan_s for count in (60, 120))
        each = (many - few) / 60
        if name == "1F1B":
            # Round trips of several stages average out: the plan counts each message in full.
            assert each <= plan.bottleneck_s
        else:
            assert each == pytest.approx(plan.bottleneck_s)


def test_nothing_to_do_takes_no_time_and_has_no_bubble() -> None:
    result = simulate(get_schedule("GPipe")(2, 2), [StageCost(0.0, 0.0)] * 2)
    assert (result.makespan_s, result.bubble) == (0.0, 0.0)


def test_one_cost_a_stage_is_needed() -> None:
    with pytest.raises(PlanError, match="there are 1 costs for 2 stages: give one a stage"):
        simulate(get_schedule("GPipe")(2, 2), [StageCost(1.0, 1.0)])


def test_the_cluster_must_have_the_ranks() -> None:
    with pytest.raises(PlanError, match="the schedule has 2 ranks, the cluster 1: give it as many"):
        simulate(get_schedule("GPipe")(2, 2), [StageCost(1.0, 1.0)] * 2, Cluster(1))


def test_a_schedule_that_stalls_is_an_error() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 waits at action 1 \(0B0\) for 1B0 \(or I\), for ever"):
        simulate(Schedule.from_csv("0F0,0B0,1F0,1B0\n"), [StageCost(1.0, 1.0)] * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 1.0), "forward_s is -1.0"),
        ((1.0, 1.0, 0.5), "one of backward_input_s and backward_weight_s is given: give both or none"),
        ((1.0, 1.0, None, None, -5), "send_bytes is -5"),
    ],
)
def test_a_cost_out_of_range_is_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        StageCost(*arguments)  # type: ignore[arg-type]


def test_both_ends_of_a_message_work_for_it() -> None:
    schedule = get_schedule("GPipe")(2, 2)
    costs = [StageCost(1.0, 2.0, send_bytes=4), StageCost(1.0, 2.0)]
    cluster = Cluster(2, bandwidth_bytes_per_s=4.0, overhead_s=0.25, overhead_s_per_byte=0.0625)
    result = simulate(schedule, costs, cluster)
    # Each pass takes half a second longer, and each message a second.
    # rank 0   0F0 0F1 . . .             0B0 0B1
    # rank 1           1F0 1F1 1B0 1B1
    assert result.busy_s == (8.0, 8.0)
    assert result.spans[0].end_s == 1.5
    assert result.makespan_s == 1.5 + 1.0 + 2 * 1.5 + 2 * 2.5 + 1.0 + 2.5
    lowered = simulate(lower(schedule), costs, cluster)
    assert (lowered.makespan_s, lowered.busy_s) == (result.makespan_s, result.busy_s)
    assert [str(span.action) for span in result.critical_path] == [
        "0F0",
        "0SEND_F0",
        "1F0",
        "1F1",
        "1B0",
        "1SEND_B0",
        "0B0",
        "0B1",
    ]


def test_the_work_grows_as_the_step_does() -> None:
    """For each pass all edges were gone through, and for each stage all passes: 4,000 stages took minutes."""
    lines = {}
    for stages in (100, 200):
        schedule = get_schedule("1F1B")(stages, 2).without_idle()
        count = 0

        def add(*_: object) -> object:
            nonlocal count
            count += 1
            return add

        before = sys.gettrace()
        sys.settrace(add)
        try:
            simulate(schedule, [StageCost(1.0, 2.0)] * stages)
        finally:
            sys.settrace(before)
        lines[stages] = count
    assert lines[200] < 2.2 * lines[100]
