from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.planning import Cluster, Schedule, StageCost, get_schedule, simulate, validate
from partita.planning.generators.making.problem import scheduling_problem
from partita.planning.searching.orders.clock import (
    fits,
    make_schedule,
    one_by_one,
    overflow,
    rows_of,
    run_changed_rows,
    run_rows,
)

seconds = st.floats(0.25, 4.0)
NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBH2", "ZBVZeroBubble", "VMin", "ForwardOnly")


@st.composite
def stage_costs(draw: st.DrawFn, stages: int) -> list[StageCost]:
    return [
        StageCost(
            draw(seconds),
            draw(seconds),
            draw(seconds),
            draw(seconds),
            send_bytes=draw(st.integers(0, 3)),
            activation_bytes=draw(st.integers(0, 9)),
            weight_activation_bytes=draw(st.integers(0, 12)),
            static_bytes=draw(st.integers(0, 3)),
            forward_workspace_bytes=draw(st.integers(0, 3)),
            backward_workspace_bytes=draw(st.integers(0, 3)),
            recompute_s=draw(st.sampled_from([0.0, 1.5])),
            recompute_bytes=draw(st.integers(0, 3)),
        )
        for _ in range(stages)
    ]


@st.composite
def clusters(draw: st.DrawFn, ranks: int) -> Cluster:
    speeds = draw(st.none() | st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * ranks))
    memory = draw(st.none() | st.integers(20, 90))
    return draw(
        st.sampled_from(
            [
                Cluster(ranks, speeds=speeds, memory_bytes=memory),
                Cluster(ranks, 4.0, 0.3, memory, speeds=speeds),
                Cluster(ranks, 4.0, 0.3, memory, speeds=speeds, overhead_s=0.5, overhead_s_per_byte=0.25),
            ]
        )
    )


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_it_has_the_times_and_the_memory_of_the_simulator(data: st.DataObject) -> None:
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    schedule = get_schedule(data.draw(st.sampled_from(NAMES)))(2 * ranks, microbatches, ranks)
    costs, cluster = data.draw(stage_costs(2 * ranks)), data.draw(clusters(ranks))
    problem = scheduling_problem(costs, schedule.stage_ranks, microbatches, cluster)
    rows = rows_of(schedule)
    result = simulate(schedule, costs, cluster)
    timing = run_rows(problem, rows)
    assert timing is not None
    assert timing.end_s == pytest.approx(result.makespan_s)
    excess = overflow(problem, rows)
    limit = cluster.memory_bytes
    for rank, peak in enumerate(result.peak_bytes):
        if limit is not None:
            assert excess[rank] == peak - limit
            if schedule.has_backward:
                assert fits(problem, rank, rows[rank]) == (peak <= limit)
    again = make_schedule(schedule.name, schedule.stage_ranks, microbatches, rows)
    assert again == schedule.without_idle()


def test_rows_that_wait_for_each_other_have_no_end() -> None:
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    problem = scheduling_problem([StageCost(1.0, 2.0)] * 2, (0, 1), 2, Cluster(2))
    assert run_rows(problem, rows_of(schedule)) is None


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1)])
def test_one_microbatch_after_the_other_takes_the_least_memory(placement: tuple[int, ...]) -> None:
    schedule = make_schedule("one by one", placement, 3, one_by_one(placement, 3))
    validate(schedule)
    assert schedule.in_flight() == (1,) * len(placement)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rows_that_changed_are_timed_as_if_they_were_new(data: st.DataObject) -> None:
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    schedule = get_schedule(data.draw(st.sampled_from(NAMES)))(2 * ranks, microbatches, ranks)
    problem = scheduling_problem(
        data.draw(stage_costs(2 * ranks)), schedule.stage_ranks, microbatches, data.draw(clusters(ranks))
    )
    rows = rows_of(schedule)
    before = run_rows(problem, rows)
    assert before is not None
    rank = data.draw(st.integers(0, ranks - 1))
    first, last = sorted(data.draw(st.lists(st.integers(0, len(rows[rank]) - 1), min_size=2, max_size=2)))
    row = rows[rank]
    rows[rank] = [*row[:first], row[last], *row[first:last], *row[last + 1 :]]
    timing, passes = run_changed_rows(problem, rows, before, rank, first)
    again, taken = run_rows(problem, rows), 2 * problem.stages * microbatches
    assert (timing is None) == (again is None)
    if timing is not None and again is not None:
        assert (timing.end_s, timing.starts, timing.total_s) == (again.end_s, again.starts, again.total_s)
        assert timing.arrivals[:taken] == again.arrivals[:taken]
    assert 0 < passes <= sum(map(len, rows))
