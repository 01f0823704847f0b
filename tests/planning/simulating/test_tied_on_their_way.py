"""Gradients of tied parameters that wait, against what the runtime's own program lets go of when."""

from __future__ import annotations

import pytest

from partita.pipelining.steps.running.program import receives_ahead
from partita.planning import (
    Action,
    ActionKind,
    Cluster,
    CostModel,
    Schedule,
    StageCost,
    TiedUnits,
    Unit,
    get_schedule,
    lower,
    search,
    send_ends,
    simulate,
)
from partita.planning.simulating.messages import RECEIVED_AHEAD
from partita.planning.simulating.tied_on_their_way import tied_beside_passes

BACK = (ActionKind.B, ActionKind.I)
SHAPES = [("1F1B", 1), ("GPipe", 1), ("ZBH1", 1), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2)]


def beside(schedule: Schedule, costs: list[StageCost]) -> list[list[int]]:
    rows = [[action for action in row if action is not None] for row in schedule.rows]
    return tied_beside_passes(rows, costs, schedule.stage_ranks)


def tied_to_first(stages: int) -> list[StageCost]:
    return [StageCost(1.0, 2.0)] * (stages - 1) + [StageCost(1.0, 2.0, tied_gradients=((0, 1),))]


def sent_and_not_let_go(schedule: Schedule, rank: int) -> list[int]:
    """How many the sending rank has beside each of its passes, those of the pass itself left out."""
    last = schedule.stages - 1
    edges = {*((stage, stage + 1) for stage in range(last)), (0, last)}
    links = {*((stage, stage + 1) for stage in range(last)), *((after, before) for before, after in edges)}
    lowered = lower(schedule, edges)
    ends = send_ends(lowered, edges, links=links)[rank]
    counts, under_way = list[int](), set[Action]()
    for action in lowered.actions(rank):
        under_way -= {*ends.answered.get(action, ()), *ends.unanswered.get(action, ())}
        if action.kind is ActionKind.SEND_B and (action.stage, action.other_stage) == (last, 0):
            under_way.add(action)
        elif action.is_compute:
            counts.append(len(under_way))
    return counts


def received_and_not_taken(schedule: Schedule, rank: int) -> list[int]:
    last = schedule.stages - 1
    lowered = lower(schedule, {*((stage, stage + 1) for stage in range(last)), (0, last)})
    counts, there = list[int](), set[int | None]()
    for action in receives_ahead(lowered.actions(rank), RECEIVED_AHEAD):
        if action.kind is ActionKind.RECV_B and (action.stage, action.other_stage) == (0, last):
            there.add(action.microbatch)
        elif action.is_compute:
            there -= {action.microbatch} if action.stage == 0 and action.kind in BACK else set()
            counts.append(len(there))
    return counts


@pytest.mark.parametrize(("name", "stages_a_rank"), SHAPES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_rank_has_as_many_as_its_program_has_not_let_go_of(
    name: str, stages_a_rank: int, ranks: int
) -> None:
    """The last of eight ranks held 8 embeddings' gradients under 1F1B, and 15 interleaved; 2 were planned."""
    stages = ranks * stages_a_rank
    schedule = get_schedule(name)(stages, 3 * ranks, ranks)
    predicted = beside(schedule, tied_to_first(stages))
    sender, receiver = schedule.stage_ranks[-1], schedule.stage_ranks[0]
    sent = sent_and_not_let_go(schedule, sender)
    assert max(predicted[sender]) in (max(sent), max(sent) + 1)
    assert sum(abs(one - other) for one, other in zip(predicted[sender], sent, strict=True)) <= len(sent)
    received = received_and_not_taken(schedule, receiver)
    assert max(predicted[receiver]) in (max(received), max(received) + 1)


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "VHalf", "VMin"])
def test_what_stays_on_a_rank_waits_there_from_pass_to_pass(name: str) -> None:
    schedule = get_schedule(name)(8, 12, 4)
    predicted = beside(schedule, tied_to_first(8))
    assert not any(map(any, predicted[1:]))
    waiting, counts = 0, list[int]()
    for action in schedule.actions(0):
        waiting -= action.kind in BACK and action.stage == 0
        counts.append(waiting)
        waiting += action.kind in BACK and action.stage == 7
    assert predicted[0] == counts


def test_so_does_the_gradient_of_a_value_that_two_stages_of_a_rank_have() -> None:
    """A U-Net's first and last stage share a rank in a V: the last hands back the gradients of the skips."""
    schedule = get_schedule("ZBVZeroBubble")(4, 8, 2)
    handing = StageCost(1.0, 2.0, handed_gradients=((0, 1),))
    assert beside(schedule, [*tied_to_first(4)[:3], handing]) == beside(schedule, tied_to_first(4))
    assert simulate(schedule, [*tied_to_first(4)[:3], handing]).peak_bytes[0] == max(
        beside(schedule, tied_to_first(4))[0]
    )


def test_a_schedule_without_backward_passes_has_none() -> None:
    schedule = get_schedule("ForwardOnly")(2, 4)
    assert beside(schedule, tied_to_first(2)) == [[0] * 4, [0] * 4]
    assert simulate(schedule, tied_to_first(2)).peak_bytes == (0, 0)


def test_what_is_never_taken_stays_to_the_end() -> None:
    schedule = Schedule.from_csv("0F0,0F1\n1F0,1B0,1F1,1B1\n")
    assert beside(schedule, tied_to_first(2)) == [[0, 0], [0, 0, 1, 1]]
    assert simulate(schedule, tied_to_first(2)).peak_bytes == (0, 1)


def test_peaks_and_memory_over_time_have_them() -> None:
    schedule = get_schedule("1F1B")(4, 12)
    sender = StageCost(1.0, 2.0, returned_gradient_bytes=10, tied_gradients=((0, 10),))
    owner = StageCost(1.0, 2.0, arriving_gradient_bytes=10)
    result = simulate(schedule, [owner, StageCost(1.0, 2.0), StageCost(1.0, 2.0), sender])
    assert result.peak_bytes[3] >= 30
    assert result.peak_bytes == tuple(max(step.bytes for step in of_rank) for of_rank in result.memory)


def test_no_candidate_of_a_search_exceeds_the_memory() -> None:
    units = tuple(
        Unit(f"u{at}", 1.0, 2.0, 800 if at in (0, 11) else 50, activation_bytes=50) for at in range(12)
    )
    tied = (TiedUnits((0, 11), 800, gradient_bytes=800),)
    costs = CostModel(units, (20,) * 11, entry_bytes=(20,) * 11, exit_bytes=(20,) * 11, tied=tied)
    for memory in (6000, 9000):
        for candidate in search(costs, Cluster(4, memory_bytes=memory), microbatches=8):
            assert max(candidate.peak_bytes) <= memory
