from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import pytest

from partita.errors import ScheduleError
from partita.pipelining.steps.running.program import AHEAD, receives_ahead
from partita.planning import Action, ActionKind, Schedule, get_schedule, lower, schedule_names


def _messages(schedule: Schedule) -> tuple[dict[tuple[int, int], list[tuple[object, ...]]], ...]:
    """For each pair of ranks (from, to) the messages in the order in which they are sent, and received."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank in range(schedule.ranks):
        for action in receives_ahead(schedule.actions(rank), AHEAD):
            if not action.is_communication:
                continue
            other = schedule.stage_ranks[action.other_stage]
            forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
            if action.is_send:
                sent[rank, other].append((forward, action.stage, action.other_stage, action.microbatch))
            else:
                received[other, rank].append((forward, action.other_stage, action.stage, action.microbatch))
    return sent, received


@pytest.mark.parametrize("name", sorted(schedule_names()))
@pytest.mark.parametrize("all_pairs", [False, True], ids=["neighbours", "skips"])
def test_both_ends_of_a_link_start_its_messages_in_one_order(name: str, all_pairs: bool) -> None:
    """Operations of one NCCL communicator run in the order in which they are started."""
    tried = 0
    for ranks in (2, 3, 4):
        for stages in (ranks, 2 * ranks, 3 * ranks):
            try:
                schedule = get_schedule(name)(stages, 2 * stages, ranks)
            except ScheduleError:
                continue  # not so many stages a rank
            edges = list(combinations(range(stages), 2)) if all_pairs else None
            sent, received = _messages(lower(schedule, edges))
            assert sent == received
            tried += len(sent)
    assert tried > 4


def test_receives_are_posted_ahead_and_keep_their_order() -> None:
    actions = [Action.parse(text) for text in ("1RECV_F0", "1F0", "1RECV_F1", "1F1", "1RECV_F2", "1F2")]
    assert [str(action) for action in receives_ahead(actions, 1)] == [
        "1RECV_F0",
        "1RECV_F1",
        "1F0",
        "1RECV_F2",
        "1F1",
        "1F2",
    ]
    assert receives_ahead(actions, 0) == tuple(actions)
