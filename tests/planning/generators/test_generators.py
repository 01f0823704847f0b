"""What holds for every schedule, over many numbers of ranks, stages and microbatches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import ScheduleError
from partita.planning import (
    Action,
    ActionKind,
    Cluster,
    Schedule,
    StageCost,
    get_schedule,
    lower,
    schedule_names,
    simulate,
    validate,
)

FLEXIBLE = ("ForwardOnly", "GPipe", "1F1B", "LoopedBFS", "ZBH1", "ZBH2", "ZB2p")
LOOPS = ("Interleaved1F1B", "InterleavedZeroBubble")
VS = ("ZBVZeroBubble", "VHalf", "VMin", "DualPipeV")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(schedule_names()))
    ranks, microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    if name in VS:
        stages = 2 * ranks
        microbatches += stages if name == "DualPipeV" else 0
    else:
        stages = draw(st.integers(ranks, 4 * ranks))
    return get_schedule(name)(stages, microbatches, ranks)


@given(schedules())
@settings(max_examples=300, deadline=None)
def test_a_schedule_is_right(schedule: Schedule) -> None:
    validate(schedule)


@given(schedules())
@settings(max_examples=150, deadline=None)
def test_a_schedule_can_be_lowered_and_simulated(schedule: Schedule) -> None:
    lowered = lower(schedule)
    validate(lowered)
    costs = [StageCost(1.0, 2.0, activation_bytes=1)] * schedule.stages
    result = simulate(schedule, costs)
    assert result == simulate(lowered, costs)
    assert len(result.spans) == sum(len(schedule.actions(rank)) for rank in range(schedule.ranks))


@given(schedules())
@settings(max_examples=100, deadline=None)
def test_each_stage_goes_through_the_microbatches_in_order(schedule: Schedule) -> None:
    # Gradients then add up in the order in which the uncut model adds them.
    seen: dict[tuple[int, ActionKind], list[int | None]] = {}
    for _, part in schedule.passes():
        kind = ActionKind.W if part.kind is ActionKind.B else part.kind
        seen.setdefault((part.stage, kind), []).append(part.microbatch)
    for (stage, kind), order in seen.items():
        if kind is not ActionKind.I:
            assert order == sorted(order, key=lambda number: number or 0), (schedule.name, stage, kind)


@given(st.sampled_from(FLEXIBLE + LOOPS), st.data())
@settings(max_examples=150, deadline=None)
def test_stages_may_be_placed_in_any_way(name: str, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    rest = data.draw(st.lists(st.integers(0, ranks - 1), max_size=6))
    placement = data.draw(st.permutations([*range(ranks), *rest]))
    microbatches = data.draw(st.integers(1, 9))
    schedule = get_schedule(name).generate(len(placement), microbatches, placement=placement)
    validate(schedule)
    assert schedule.stage_ranks == tuple(placement)


def text(schedule: Schedule) -> list[str]:
    return [" ".join("." if action is None else str(action) for action in row) for row in schedule.rows]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("ForwardOnly", ["0F0 0F1 0F2", ". 1F0 1F1 1F2"]),
        ("GPipe", ["0F0 0F1 0F2 . . 0B0 0B1 0B2", ". 1F0 1F1 1F2 1B0 1B1 1B2"]),
        ("1F1B", ["0F0 0F1 . 0B0 0F2 0B1 . 0B2", ". 1F0 1B0 1F1 1B1 1F2 1B2"]),
        ("LoopedBFS", ["0F0 0F1 0F2 . . 0B0 0B1 0B2", ". 1F0 1F1 1F2 1B0 1B1 1B2"]),
        ("Interleaved1F1B", ["0F0 0F1 . 0B0 0F2 0B1 . 0B2", ". 1F0 1B0 1F1 1B1 1F2 1B2"]),
        (
            "InterleavedZeroBubble",
            ["0F0 0F1 . 0I0 0W0 0F2 0I1 0W1 0I2 0W2", ". 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"],
        ),
    ],
)
def test_two_stages_and_three_microbatches_look_as_in_the_docstring(name: str, rows: list[str]) -> None:
    assert text(get_schedule(name)(2, 3)) == rows


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(
    ("what", "value"), [("stages", 0), ("microbatches", 0), ("microbatches", -1), ("ranks", 0)]
)
def test_a_number_below_one_is_refused(name: str, what: str, value: int) -> None:
    numbers = {"stages": 4, "microbatches": 8, "ranks": 2, what: value}
    with pytest.raises(ScheduleError, match="give a whole number of at least 1"):
        get_schedule(name)(**numbers)


@pytest.mark.parametrize("name", FLEXIBLE + LOOPS)
def test_more_ranks_than_stages_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"{name} with 2 stages on 3 ranks: give each rank a stage"):
        get_schedule(name)(2, 4, 3)


@pytest.mark.parametrize("name", VS)
def test_a_v_refuses_another_placement_and_says_what_to_build(name: str) -> None:
    text = r"with the placement \(0, 1, 0, 1\): .* into 4 stages and build stages r and 3 - r on rank r"
    with pytest.raises(ScheduleError, match=text):
        get_schedule(name)(4, 8, placement=(0, 1, 0, 1))
    with pytest.raises(ScheduleError, match="with ranks=3 and a placement on 2 ranks"):
        get_schedule(name)(4, 8, 3, (0, 1, 1, 0))
    assert get_schedule(name)(4, 8, placement=(0, 1, 1, 0)) == get_schedule(name)(4, 8, 2)


@pytest.mark.parametrize(("stages", "ranks"), [(3, 2), (5, 2), (5, 4), (7, 3)])
@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_ranks_with_unequal_numbers_of_stages_gain_from_a_split_backward(
    stages: int, ranks: int, microbatches: int
) -> None:
    def makespan(name: str) -> float:
        schedule = get_schedule(name)(stages, microbatches, ranks)
        return simulate(schedule, [StageCost(1.0, 2.0)] * stages).makespan_s

    assert makespan("InterleavedZeroBubble") < makespan("Interleaved1F1B") <= makespan("1F1B")


@pytest.mark.parametrize("name", VS)
def test_a_v_needs_two_stages_a_rank(name: str) -> None:
    with pytest.raises(ScheduleError, match="a V needs two stages a rank, so give 4 stages"):
        get_schedule(name)(6, 8, 2)


def test_dualpipe_needs_as_many_microbatches_as_stages() -> None:
    with pytest.raises(
        ScheduleError, match="DualPipeV with 3 microbatches on 4 stages: give at least 4, or take 1F1B"
    ):
        get_schedule("DualPipeV")(4, 3)


def test_ranks_and_placement_must_agree() -> None:
    with pytest.raises(ScheduleError, match="GPipe with ranks=3 and a placement on 2 ranks"):
        get_schedule("GPipe").generate(2, 3, ranks=3, placement=(0, 1))


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 3, 8, 20])
def test_split_schedules_hold_no_more_activations_than_the_paper_says(ranks: int, microbatches: int) -> None:
    cost = StageCost(1.0, 2.0, activation_bytes=1)
    one_f_one_b = simulate(get_schedule("1F1B")(ranks, microbatches), [cost] * ranks).peak_bytes
    split = simulate(get_schedule("InterleavedZeroBubble")(ranks, microbatches), [cost] * ranks).peak_bytes
    assert max(split) <= max(one_f_one_b)
    v = simulate(get_schedule("ZBVZeroBubble")(2 * ranks, microbatches), [cost] * (2 * ranks)).peak_bytes
    assert max(v) <= 2 * ranks
    dual = simulate(
        get_schedule("DualPipeV")(2 * ranks, microbatches + 2 * ranks), [cost] * (2 * ranks)
    ).peak_bytes
    assert max(dual) <= 2 * ranks + 1


@given(st.integers(1, 16), st.integers(1, 40), st.sampled_from([("VHalf", 2), ("VMin", 3)]))
@settings(max_examples=100, deadline=None)
def test_v_half_and_v_min_keep_to_their_memory(ranks: int, microbatches: int, kind: tuple[str, int]) -> None:
    name, part = kind
    schedule = get_schedule(name)(2 * ranks, microbatches)
    validate(schedule)
    costs = [StageCost(1.0, 2.0, activation_bytes=1)] * (2 * ranks)
    assert max(simulate(schedule, costs).peak_bytes) <= 2 * ((ranks + part + (part == 3)) // part)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("extra", [0, 1, 5, 12])
def test_bubbles_are_those_of_the_papers(ranks: int, extra: int) -> None:
    cost = StageCost(1.0, 2.0, 1.0, 1.0)  # F = I = W: the case that the papers tabulate
    microbatches = 2 * ranks + extra

    def idle(name: str, stages: int) -> float:
        result = simulate(get_schedule(name)(stages, microbatches, ranks), [cost] * stages)
        return result.makespan_s - stages // ranks * 3 * microbatches

    assert idle("1F1B", ranks) == 3 * (ranks - 1)
    assert idle("InterleavedZeroBubble", ranks) == ranks - 1
    assert idle("InterleavedZeroBubble", 2 * ranks) == ranks - 1
    assert idle("Interleaved1F1B", 3 * ranks) == 3 * (ranks - 1)
    assert idle("LoopedBFS", 3 * ranks) == 3 * (ranks - 1)
    # The last rank waits ranks - 1 ticks for its first input, so no schedule idles for less.
    assert idle("ZBVZeroBubble", 2 * ranks) == ranks - 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zbv_leaves_messages_the_time_of_a_pass(ranks: int) -> None:
    """Links that take a tenth of a pass, and passes that differ, cost something once, not once a round."""
    microbatches, stages = 4 * ranks, 2 * ranks
    schedule = get_schedule("ZBVZeroBubble")(stages, microbatches, ranks)
    for cost in (StageCost(1.0, 2.0, 1.0, 1.0), StageCost(1.0, 2.2, 1.2, 1.0), StageCost(1.0, 1.8, 0.9, 0.9)):
        work = 2 * microbatches * (cost.forward_s + cost.backward_s)
        idle = simulate(schedule, [cost] * stages, Cluster(ranks, latency_s=0.1)).makespan_s - work
        assert idle <= 2.2 * ranks


def test_an_action_without_a_microbatch_is_not_a_pass() -> None:
    assert Action.parse("0UNSHARD").passes == ()
