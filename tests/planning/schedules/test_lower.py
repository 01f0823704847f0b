from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import ScheduleError
from partita.planning import Schedule, get_schedule, lower, schedule_names, validate

ROWS = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"


def test_sends_follow_the_pass_and_receives_come_before_it() -> None:
    assert lower(Schedule.from_csv(ROWS)).to_csv() == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )


def test_stages_on_one_rank_exchange_nothing() -> None:
    assert not lower(Schedule.from_csv("0F0,1F0,1B0,0B0\n")).is_lowered


def test_a_skip_connection_names_the_stage_at_the_other_end() -> None:
    schedule = get_schedule("ForwardOnly")(3, 1)
    assert lower(schedule, [(0, 1), (1, 2), (0, 2)]).to_csv() == (
        "0F0,0SEND_F0,0SEND_F0>2\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0>0,2RECV_F0,2F0\n"
    )


def test_a_message_that_is_needed_late_is_received_in_its_turn() -> None:
    # Stage 0 sends microbatch 0 first, stage 1 takes 1 first: microbatch 0 is received early and kept.
    schedule = Schedule.from_csv("0F0,0F1\n1F1,1F0\n")
    assert lower(schedule).to_csv().splitlines()[1] == "1RECV_F0,1RECV_F1,1F1,1F0"


def test_other_actions_stay_where_they_are() -> None:
    text = "0UNSHARD,0F0,0RESHARD,0B0,0REDUCE_GRAD\n1F0,1B0\n"
    assert lower(Schedule.from_csv(text)).to_csv().splitlines()[0] == (
        "0UNSHARD,0F0,0SEND_F0,0RESHARD,0RECV_B0,0B0,0REDUCE_GRAD"
    )


def test_a_lowered_schedule_is_not_lowered_again() -> None:
    with pytest.raises(
        ScheduleError, match=r"has sends and receives already: use it, or lower compute_only\(\)"
    ):
        lower(lower(Schedule.from_csv(ROWS)))


def test_a_schedule_that_stalls_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the schedule stalls"):
        lower(Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"))


@st.composite
def edges(draw: st.DrawFn, stages: int) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    chain = [(stage, stage + 1) for stage in range(stages - 1)]
    return draw(st.sampled_from([chain, []])) + draw(st.lists(st.sampled_from(pairs), unique=True))


@given(st.sampled_from(schedule_names()), st.integers(1, 4), st.integers(0, 5), st.data())
@settings(max_examples=300, deadline=None)
def test_a_lowered_schedule_is_right_whatever_the_edges(
    name: str, ranks: int, more: int, data: st.DataObject
) -> None:
    stages = 2 * ranks
    schedule = get_schedule(name)(stages, stages + more, ranks)
    pairs = data.draw(edges(stages))
    lowered = lower(schedule, pairs)
    validate(lowered, pairs)
    assert lowered.compute_only() == schedule.without_idle()
    assert lower(schedule, pairs) == lowered
