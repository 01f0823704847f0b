"""Which schedules are compared, with what costs."""

from __future__ import annotations

import pytest

from partita.cli.options.schedule_cases import (
    StageTimes,
    cases_from_times,
    schedule_kinds,
    simulate_cases,
    stages_a_rank,
)
from partita.errors import ScheduleError, UsageError
from partita.planning import Cluster, get_schedule

TIMES = StageTimes((2.0,), (2.0,), (4.0,))


def test_all_names_what_trains_and_each_name_counts_once() -> None:
    assert all(kind.trains for kind in schedule_kinds("ALL"))
    assert [kind.name for kind in schedule_kinds(" 1f1b, VMIN,1F1B ")] == ["1F1B", "VMin"]


def test_all_may_stand_beside_names() -> None:
    """``--schedule all,ForwardOnly`` said that there is no schedule 'all'."""
    every = schedule_kinds("all")
    assert schedule_kinds("1F1B,all") == tuple(sorted(every, key=lambda kind: kind.name != "1F1B"))
    assert schedule_kinds("all,ForwardOnly") == (*every, get_schedule("ForwardOnly"))


def test_where_nobody_says_how_many_stages_the_work_of_a_rank_is_divided_among_its_own() -> None:
    one, two = cases_from_times(
        schedule_kinds("1F1B,VHalf"), TIMES, Cluster(4), stages=None, microbatches=8, memory=None
    )
    assert [len(one.costs), len(two.costs)] == [4, 8]
    assert (one.costs[0].forward_s, two.costs[0].forward_s) == (2.0, 1.0)
    assert sum(cost.backward_s for cost in two.costs) == sum(cost.backward_s for cost in one.costs)
    assert stages_a_rank(get_schedule("Interleaved1F1B")) == 2


def test_one_time_a_stage_has_to_be_as_many() -> None:
    with pytest.raises(UsageError, match="--w has 2 times for 3 stages: give one or 3"):
        StageTimes((1.0,), (1.0,), (1.0, 2.0)).costs(3)


def test_where_nothing_can_be_made_the_first_reason_is_given() -> None:
    cases = cases_from_times(
        schedule_kinds("VHalf,VMin"), TIMES, Cluster(4), stages=4, microbatches=8, memory=None
    )
    with pytest.raises(
        ScheduleError, match="none of the 2 schedules can be made: VHalf: 4 stages on 4 ranks"
    ):
        simulate_cases(cases, lambda _: None)
