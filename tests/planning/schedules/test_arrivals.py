from __future__ import annotations

from collections.abc import Iterable

import pytest

from partita.errors import ScheduleError
from partita.planning import Action, Schedule, get_schedule, lower, schedule_names, send_ends


def _lowered(name: str, ranks: int, microbatches: int) -> Schedule:
    kind = get_schedule(name)
    for stages in (ranks, 2 * ranks):
        try:
            return lower(kind(stages, microbatches, ranks))
        except ScheduleError:
            continue
    raise AssertionError(f"{name} takes neither one nor two stages a rank")


def _held(schedule: Schedule, rank: int, ends: dict[Action, tuple[Action, ...]]) -> int:
    """How many messages the rank holds on to at most."""
    held: set[Action] = set()
    most = 0
    for action in schedule.actions(rank):
        if action.is_send:
            for end in ends.get(action, ()):
                held.remove(end)  # sent before, and ended once
            held.add(action)
            most = max(most, len(held))
    return most


def _all_ends(schedule: Schedule, most_unanswered: int = 16) -> list[dict[Action, tuple[Action, ...]]]:
    return [
        {
            send: one.answered.get(send, ()) + one.unanswered.get(send, ())
            for send in one.answered | one.unanswered
        }
        for one in send_ends(schedule, most_unanswered=most_unanswered)
    ]


@pytest.mark.parametrize("name", sorted(schedule_names()))
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 40)])
def test_what_is_held_does_not_grow_with_the_number_of_microbatches_beyond_what_is_in_flight(
    name: str, ranks: int, microbatches: int
) -> None:
    schedule = _lowered(name, ranks, microbatches)
    in_flight = schedule.in_flight()
    for rank, ends in enumerate(_all_ends(schedule)):
        own = [stage for stage, holder in enumerate(schedule.stage_ranks) if holder == rank]
        assert _held(schedule, rank, ends) <= 2 * sum(in_flight[stage] for stage in own) + 17


def test_forward_only_keeps_sixteen_unless_told_otherwise() -> None:
    schedule = lower(get_schedule("ForwardOnly")(3, 100))
    assert [_held(schedule, rank, ends) for rank, ends in enumerate(_all_ends(schedule))] == [16, 16, 0]
    assert [_held(schedule, rank, ends) for rank, ends in enumerate(_all_ends(schedule, 3))] == [3, 3, 0]
    assert not any(ends.answered for ends in send_ends(schedule))


def _schedule(rows: Iterable[str]) -> Schedule:
    return Schedule.from_csv("\n".join(rows) + "\n", microbatches=3)


def _as_text(ends: dict[Action, tuple[Action, ...]]) -> dict[str, list[str]]:
    return {str(send): list(map(str, earlier)) for send, earlier in ends.items()}


def test_a_wait_that_would_never_end_is_left_out() -> None:
    """Rank 0 feeds stage 3 on rank 2 first, but rank 2 posts that receive only after stage 2, which waits
    for what rank 0 sends last.
    """
    rows = (
        "0F0,0SEND_F0>3,0F1,0SEND_F1>3,0F2,0SEND_F2>3,0SEND_F0>1,0SEND_F1>1,0SEND_F2>1",
        "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,1RECV_F2,1F2,1SEND_F2",
        "2RECV_F0,2F0,2RECV_F1,2F1,2RECV_F2,2F2,3RECV_F0>0,3F0,3RECV_F1>0,3F1,3RECV_F2>0,3F2",
    )
    schedule = _schedule(rows)
    edges = {(0, 1), (1, 2), (0, 3), (2, 3)}
    first, second, _ = send_ends(schedule, edges, most_unanswered=2)
    assert not first.unanswered
    assert not second.unanswered
    without_skip = {(0, 1), (1, 2), (2, 3)}
    rows = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2",
        rows[1],
        "2RECV_F0,2F0,2RECV_F1,2F1,2RECV_F2,2F2,3F0,3F1,3F2",
    )
    first, second, _ = send_ends(_schedule(rows), without_skip, most_unanswered=2)
    assert {str(send): list(map(str, ends)) for send, ends in first.unanswered.items()} == {
        "0SEND_F2": ["0SEND_F0"]
    }
    assert {str(send): list(map(str, ends)) for send, ends in second.unanswered.items()} == {
        "1SEND_F2": ["1SEND_F0"]
    }


def test_from_a_message_of_nothing_nothing_is_heard() -> None:
    """No gradients go back to a frozen stage: that it may go on says nothing about what it has sent."""
    schedule = lower(get_schedule("1F1B")(2, 6), {(0, 1)})
    assert send_ends(schedule, {(0, 1)})[0].answered
    first, last = send_ends(schedule, {(0, 1)}, links={(0, 1)}, most_unanswered=2)
    assert not first.answered
    assert _as_text(first.unanswered)["0SEND_F2"] == ["0SEND_F0"]
    assert not last.answered


def test_what_has_been_received_is_let_go_of_at_a_send_that_takes_place() -> None:
    """A table goes from stage 0 to stage 2, and no gradient back: what was to be let go of at the send of
    that gradient, which is none, was there until the end of the step.
    """
    edges = [(0, 1), (1, 2), (2, 3), (0, 2)]
    links = {*edges, (1, 0), (2, 1), (3, 2)}
    schedule = lower(get_schedule("ZBVZeroBubble")(4, 8, 2), edges)
    ends = send_ends(schedule, edges, links=links)[1]
    assert not any(str(send).endswith(">0") for send in ends.answered)
    assert len({end for ended in ends.answered.values() for end in ended}) == 14
