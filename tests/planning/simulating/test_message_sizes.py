"""How large messages are, and what stages of one rank hand to each other."""

from __future__ import annotations

import pytest

from partita.planning import (
    ActionKind,
    Cluster,
    CostModel,
    Schedule,
    StageCost,
    TiedUnits,
    Unit,
    get_schedule,
    search,
    simulate,
)
from partita.planning.schedules.actions import PASS_NUMBERS
from partita.planning.simulating.message_sizes import handed_beside, handed_on_ranks, message_sizes

BACK = (ActionKind.B, ActionKind.I)


def beside(schedule: Schedule, costs: list[StageCost]) -> list[list[int]]:
    handed = handed_on_ranks(costs, schedule.stage_ranks)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in handed]
    for rank, part in schedule.passes():
        rows[rank].append((PASS_NUMBERS[part.kind], part.stage, part.microbatch or 0))
    return list(map(handed_beside, rows, handed))


def tied_to_first(stages: int) -> list[StageCost]:
    return [StageCost(1.0, 2.0)] * (stages - 1) + [StageCost(1.0, 2.0, tied_gradients=((0, 1),))]


def test_a_value_that_goes_past_a_stage_and_its_gradient_are_messages_of_their_own() -> None:
    """They counted with those of the neighbours."""
    costs = [
        StageCost(1.0, 2.0, sent_values=((1, 5), (2, 90))),
        StageCost(1.0, 2.0, sent_values=((2, 6),), handed_gradients=((0, 4),)),
        StageCost(1.0, 2.0, sent_values=(), handed_gradients=((0, 80), (1, 3)), tied_gradients=((0, 7),)),
    ]
    sizes = message_sizes(costs, (0, 1, 2))
    gradients = {(True, 1, 0): 4, (True, 2, 0): 87, (True, 2, 1): 3}
    assert sizes.sent == gradients
    assert sizes.coming == {(False, 0, 1): 5, (False, 0, 2): 90, (False, 1, 2): 6} | gradients
    assert handed_on_ranks(costs, (0, 1, 2)) == [[], [], []]
    back_up = message_sizes(costs, (0, 1, 0))
    assert back_up.coming == {(False, 0, 1): 5, (False, 1, 2): 6, (True, 1, 0): 4, (True, 2, 1): 3}
    assert handed_on_ranks(costs, (0, 1, 0)) == [[(2, 0, 80), (2, 0, 7)], []]


def test_where_costs_do_not_say_so_all_of_it_is_the_neighbours() -> None:
    cost = StageCost(
        1.0, 2.0, arriving_bytes=5, arriving_gradient_bytes=9, returned_gradient_bytes=9, tied_gradients=()
    )
    tied = StageCost(1.0, 2.0, arriving_bytes=5, returned_gradient_bytes=9, tied_gradients=((0, 7),))
    sizes = message_sizes([cost, cost, tied], (0, 1, 2))
    assert sizes.coming == {
        (False, 0, 1): 5,
        (True, 1, 0): 2,
        (False, 1, 2): 5,
        (True, 2, 1): 9,
        (True, 2, 0): 7,
    }
    assert sizes.sent == {(True, 1, 0): 9, (True, 2, 1): 2, (True, 2, 0): 7}
    frozen = StageCost(1.0, 2.0, arriving_bytes=5)
    assert message_sizes([frozen, frozen], (0, 1)) == ({(False, 0, 1): 5}, {})


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


def test_without_backward_passes_no_gradient_lies_anywhere() -> None:
    schedule = get_schedule("ForwardOnly")(2, 4)
    assert simulate(schedule, tied_to_first(2)).peak_bytes == (0, 0)


def test_what_is_never_taken_stays_to_the_end() -> None:
    schedule = Schedule.from_csv("0F0,0F1\n1F0,1B0,1F1,1B1\n")
    assert simulate(schedule, tied_to_first(2)).peak_bytes == (0, 1)


def test_the_last_rank_holds_the_gradients_of_an_embedding_until_the_first_has_taken_them() -> None:
    """The last of eight ranks held 8 embeddings' gradients under 1F1B; 2 were planned."""
    schedule = get_schedule("1F1B")(8, 24)
    first = StageCost(1.0, 2.0, arriving_gradient_bytes=1)
    middle = StageCost(1.0, 2.0, returned_gradient_bytes=0)
    last = StageCost(1.0, 2.0, returned_gradient_bytes=1, tied_gradients=((0, 1),))
    assert simulate(schedule, [first, *[middle] * 6, last]).peak_bytes[7] == 8


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
