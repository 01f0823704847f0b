"""Messages in the memory of a rank, as the runtime holds them."""

from __future__ import annotations

from dataclasses import replace

from partita.planning import StageCost, get_schedule, simulate
from partita.planning.simulating.messages import beside_passes


def test_two_messages_come_and_two_gradients_stay() -> None:
    arriving = [1, 10, 100, 1000]
    assert beside_passes(arriving, [0] * 4) == [110, 1100, 1000, 0]
    assert beside_passes([0] * 5, [1, 0, 10, 100, 0]) == [0, 1, 1, 11, 110]


def test_at_the_peak_of_gpipe_nothing_enters_the_last_stage_and_two_gradients_come_to_the_first() -> None:
    """Both were taken to hold what lies there while a middle stage alternates between F and B: of a U-Net,
    whose messages are large, the last rank held 8 % less and the first 7 % more.
    """
    cost = StageCost(1.0, 2.0, activation_bytes=100)
    first = replace(cost, arriving_gradient_bytes=10)
    last = replace(cost, arriving_bytes=10, returned_gradient_bytes=10)
    schedule = get_schedule("GPipe")(2, 4)
    result = simulate(schedule, [first, last])
    assert result.peak_bytes == (4 * 100 + 2 * 10, 4 * 100)
    assert [max(step.bytes for step in steps) for steps in result.memory] == list(result.peak_bytes)


def test_messages_of_the_other_stages_of_a_rank_count() -> None:
    cost = StageCost(1.0, 2.0, activation_bytes=100)
    large = replace(cost, arriving_bytes=50, returned_gradient_bytes=50)
    schedule = get_schedule("Interleaved1F1B")(4, 4, 2)
    before = simulate(schedule, [cost] * 4).peak_bytes
    after = simulate(schedule, [cost, cost, cost, large]).peak_bytes
    assert after[0] == before[0]
    assert before[1] + 100 <= after[1] <= before[1] + 200
