from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import ScheduleError
from partita.planning import Action, Schedule, get_schedule, lower, schedule_names, validate

RIGHT = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"
LOWERED = lower(Schedule.from_csv(RIGHT)).to_csv()


def check(text: str, **options: object) -> None:
    validate(Schedule.from_csv(text, **options))  # type: ignore[arg-type]


def test_a_right_schedule_passes() -> None:
    check(RIGHT)
    check(LOWERED)


def test_forward_passes_alone_are_right() -> None:
    check("0F0,0F1\n1F0,1F1\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F0,0B0\n", "rank 0, position 1 (0F0): 0F0 is already at position 0; keep one"),
        ("0F1,0B1\n", "rank 0, stage 0, microbatch 0: there is no forward pass; add 0F0"),
        ("0F0,0F1,0B0\n", "rank 0, stage 0, microbatch 1: there is no whole backward pass; add 0B1"),
        ("0F0,0I0\n", "rank 0, stage 0, microbatch 0: there is no whole backward pass; add 0B0, or 0W0"),
        ("0F0,0W0\n", "there is no whole backward pass; add 0B0, or 0I0 to the other half"),
        ("0F0,0I0,0B0\n", "0B0 at position 2 and 0I0 at position 1 both go back; give B, or I and W"),
        ("0B0,0F0\n", "rank 0, position 0 (0B0): it needs 0F0, which is at position 1; move it before"),
        ("0F0,0W0,0I0\n", "rank 0, position 1 (0W0): it needs 0I0, which is at position 2"),
        ("0F0,1F0,,0B0,1B0\n", "the schedule stalls: rank 0 waits at position 3 (0B0) for 1B0 (or I)"),
        ("0F0,0SEND_F0\n1F0,1RECV_F0\n", "rank 1 waits at position 0 (1F0) for 1RECV_F0 from stage 0"),
        ("0F0,0SEND_F0\n1F0\n", "rank 1: 1RECV_F0 from stage 0 is missing; add it, or use lower()"),
        ("0F0\n1RECV_F0,1F0\n", "rank 0: 0SEND_F0 to stage 1 is missing"),
        ("0F0,0SEND_F0,0SEND_F0\n1RECV_F0,1F0\n", "rank 0, position 2 (0SEND_F0): it stands twice"),
        ("0F0,0SEND_F0,1F0\n", "rank 0, position 1 (0SEND_F0): nothing goes there from stage 0 to stage 1"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0\n", "rank 1, position 2 (1SEND_F0): nothing goes there"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_rank_and_action(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(text)
    assert message in str(caught.value)


def test_receives_in_another_order_than_sends_are_refused() -> None:
    text = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1F1,1RECV_F0,1F0\n"
    with pytest.raises(
        ScheduleError, match=r"rank 1, position 0 \(1RECV_F1\): the next message from rank 0 is 0SEND_F0"
    ):
        check(text)


def test_two_ranks_that_wait_for_each_other_are_both_named() -> None:
    text = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"
    with pytest.raises(
        ScheduleError, match=r"rank 0 waits at position 1 \(0B0\).*; rank 1 waits at position 0 \(1F1\)"
    ):
        check(text)


def test_an_action_on_the_rank_of_another_stage_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match=r"rank 0, position 1 \(1F0\): stage 1 is on rank 1; move the action there"
    ):
        check("0F0,1F0\n\n", stage_ranks=(0, 1))


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ScheduleError, match="there is no stage 1, stages are 0 to 0"):
        check("0F0,1F0\n", stage_ranks=(0,))


def test_a_microbatch_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ScheduleError, match="there is no microbatch 1, they are 0 to 0"):
        check("0F0,0F1\n", microbatches=1)


@pytest.mark.parametrize("edge", [(1, 0), (0, 0), (0, 5), (-1, 1)])
def test_an_edge_goes_to_a_later_stage(edge: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match=f"the edge from stage {edge[0]} to stage {edge[1]} can't be"):
        validate(Schedule.from_csv(RIGHT), edges=[edge])


def test_stages_without_an_edge_need_not_wait() -> None:
    validate(Schedule.from_csv("0F0,0B0\n1F0,1B0\n"), edges=[])
    with pytest.raises(ScheduleError, match="stalls"):
        validate(Schedule.from_csv("0F0,0B0,1F0,1B0\n"))


@given(st.sampled_from(schedule_names()), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_schedule_that_loses_any_pass_or_message_is_refused(
    name: str, lowered: bool, data: st.DataObject
) -> None:
    schedule = get_schedule(name)(stages=4, microbatches=5, ranks=2)
    schedule = lower(schedule) if lowered else schedule.without_idle()
    rank = data.draw(st.integers(0, 1))
    position = data.draw(st.integers(0, len(schedule.rows[rank]) - 1))
    rows: list[tuple[Action | None, ...]] = list(schedule.rows)
    rows[rank] = rows[rank][:position] + rows[rank][position + 1 :]
    with pytest.raises(ScheduleError):
        validate(Schedule(name, schedule.stage_ranks, schedule.microbatches, tuple(rows)))
