"""The sums of tied parameters' gradients after a step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from partita.errors import ScheduleError
from partita.planning import ActionKind, Cluster, Simulation, StageCost, get_schedule, simulate
from partita.planning.simulating.gradient_sums import GradientSum, gradient_sums
from partita.planning.simulating.summary import step_summary


def with_sum(*sums: tuple[int, tuple[int, ...]]) -> StageCost:
    return StageCost(1.0, 2.0, summed_gradients=sums)


PLAIN = StageCost(1.0, 2.0)
LINKS = Cluster(4, bandwidth_bytes_per_s=4.0)


def summed(costs: list[StageCost]) -> list[tuple[tuple[int, tuple[int, ...]], ...]]:
    return [cost.summed_gradients for cost in costs]


def run(costs: list[StageCost]) -> Simulation:
    return simulate(get_schedule("1F1B")(4, 2), costs, Cluster(4, bandwidth_bytes_per_s=4.0))


def test_the_step_ends_with_the_sum() -> None:
    before = run([PLAIN] * 4)
    after = run([with_sum((8, (3,))), PLAIN, PLAIN, PLAIN])
    assert after.makespan_s == before.makespan_s + LINKS.all_reduce_s(8, (0, 3))
    assert after.spans == before.spans
    assert after.rank_span_s == before.rank_span_s
    summary = step_summary(get_schedule("1F1B")(4, 2), after.costs, LINKS)
    assert (summary.makespan_s, summary.span_s) == (after.makespan_s, after.span_s)


def test_each_rank_that_takes_part_has_it_among_its_collectives() -> None:
    after = run([with_sum((8, (2, 3))), PLAIN, PLAIN, PLAIN])
    assert [span.rank for span in after.collectives] == [0, 2, 3]
    assert {(span.action.stage, span.action.kind) for span in after.collectives} == {
        (0, ActionKind.REDUCE_GRAD)
    }
    assert len({(span.start_s, span.end_s) for span in after.collectives}) == 1


def test_a_sum_waits_for_the_last_rank_that_takes_part() -> None:
    costs = [PLAIN, with_sum((8, (3,))), PLAIN, with_sum()]
    ends = [[9.0], [8.0, 3.0], [5.0], [4.0]]
    assert gradient_sums(summed(costs), (0, 1, 2, 3), LINKS, ends) == (
        GradientSum(1, (1, 3), 8.0, 8.0 + 2.0),
    )


def test_a_rank_sums_one_after_the_other() -> None:
    costs = [with_sum((8, (1,)), (16, (2,))), PLAIN, with_sum((8, (3,))), PLAIN]
    sums = gradient_sums(summed(costs), (0, 1, 2, 3), LINKS, [[1.0]] * 4)
    assert [(one.ranks, one.start_s, one.end_s) for one in sums] == [
        ((0, 1), 1.0, 3.0),
        ((0, 2), 3.0, 7.0),
        ((2, 3), 7.0, 9.0),
    ]


def test_stages_of_one_rank_have_nothing_to_sum() -> None:
    costs = [with_sum((8, (3,))), PLAIN, PLAIN, PLAIN]
    assert gradient_sums(summed(costs), (0, 1, 1, 0), LINKS, [[1.0]] * 2) == ()


def test_the_critical_path_goes_on_into_the_sums() -> None:
    slow = StageCost(1.0, 9.0)
    result = run([with_sum((8, (3,))), slow, with_sum((80, (3,))), PLAIN])
    path = result.critical_path
    assert path[0].start_s == 0.0
    assert path[-1].end_s == result.makespan_s
    assert all(before.end_s == after.start_s for before, after in pairwise(path))
    assert [span.action.kind for span in path[-2:]] == [ActionKind.REDUCE_GRAD] * 2


@pytest.mark.parametrize("other", [9, 1, 0])
def test_a_sum_with_a_stage_that_is_no_later_one_is_refused(other: int) -> None:
    """A plan file with such a stage ended in an IndexError of the simulator."""
    message = rf"summed_gradients of stage 1 names the stages \({other},\): give later ones, and stages are 0"
    with pytest.raises(ScheduleError, match=message):
        run([PLAIN, with_sum((8, (other,))), PLAIN, PLAIN])
