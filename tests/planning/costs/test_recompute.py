from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import PlanError
from partita.planning import (
    ActionKind,
    CostModel,
    StageCost,
    Unit,
    get_schedule,
    recomputed_cost,
    simulate,
)
from partita.planning.costs.recompute import recompute_options
from partita.planning.costs.shared_on_rank import shared_on_rank
from partita.planning.costs.spanning import NOTHING_SHARED

SPLIT = CostModel(
    tuple(
        Unit(
            f"u{index}",
            forward_s=1.0 + index,
            backward_s=5.0,
            activation_bytes=10,
            backward_input_s=3.0,
            backward_weight_s=2.0,
            weight_activation_bytes=6,
            forward_workspace_bytes=1,
        )
        for index in range(4)
    ),
    (3, 3, 3),
    entry_bytes=(2, 2, 2),
    exit_bytes=(1, 1, 1),
)


def test_without_regions_it_is_the_sum_of_the_units() -> None:
    assert recomputed_cost(SPLIT, 1, 2) == StageCost(
        5.0,
        10.0,
        6.0,
        4.0,
        send_bytes=3,
        send_grad_bytes=3,
        activation_bytes=23,
        weight_activation_bytes=15,
        forward_workspace_bytes=1,
        arriving_bytes=3,
        arriving_gradient_bytes=3,
        returned_gradient_bytes=3,
    )


def test_a_whole_stage_keeps_what_enters_and_its_weights_wait_as_before() -> None:
    cost = recomputed_cost(SPLIT, 1, 2, [(1, 2)])
    assert cost.activation_bytes == 3
    assert cost.seconds(ActionKind.F) == 5.0
    assert cost.seconds(ActionKind.B) == 15.0
    assert (cost.seconds(ActionKind.I), cost.seconds(ActionKind.W)) == (11.0, 4.0)
    assert cost.recompute_bytes == 21
    assert cost.weight_bytes == 15
    assert cost.forward_workspace_bytes == 11


def test_a_part_of_a_stage_does_its_weights_in_i() -> None:
    cost = recomputed_cost(SPLIT, 0, 3, [(1, 2)])
    assert cost.activation_bytes == 20 + 3
    assert cost.recompute_s == 5.0
    assert cost.recompute_bytes == 20
    assert (cost.seconds(ActionKind.I), cost.seconds(ActionKind.W)) == (12.0 + 5.0 + 4.0, 4.0)
    assert cost.weight_bytes == 12
    assert cost.seconds(ActionKind.B) == 25.0


def test_parts_come_back_one_at_a_time() -> None:
    whole, parts = (recomputed_cost(SPLIT, 0, 3, regions) for regions in ([(0, 3)], [(0, 1), (2, 3)]))
    assert whole.recompute_bytes == 2 * parts.recompute_bytes
    assert parts.activation_bytes == 3
    assert parts.weight_bytes == 0


def test_the_first_stage_whose_weights_do_it_all_still_recomputes() -> None:
    units = (Unit("a", 1.0, 2.0, 0, 0, 8, (), 0.0, 2.0), Unit("b", 1.0, 2.0, 0, 0, 8, (), 1.0, 1.0))
    cost = recomputed_cost(CostModel(units, (4,)), 0, 1, [(1, 1)])
    assert (cost.seconds(ActionKind.I), cost.seconds(ActionKind.W)) == (3.0, 2.0)


@pytest.mark.parametrize("regions", [[(0, 0)], [(1, 4)], [(2, 1)], [(1, 2), (2, 3)]])
def test_regions_that_are_not_in_the_stage_are_refused(regions: list[tuple[int, int]]) -> None:
    with pytest.raises(PlanError, match="give regions within the stage, in order and apart"):
        recomputed_cost(SPLIT, 1, 3, regions)


def test_units_that_do_not_exist_are_refused() -> None:
    with pytest.raises(PlanError, match="units 2 to 9 are no stage: give two of 0 to 3"):
        recomputed_cost(SPLIT, 2, 9)


@st.composite
def stages(draw: st.DrawFn) -> tuple[CostModel, int, int]:
    small = st.integers(0, 9)
    units = tuple(
        Unit(f"u{index}", float(draw(small)), float(draw(small)), activation_bytes=draw(small))
        for index in range(draw(st.integers(1, 12)))
    )
    costs = CostModel(units, tuple(draw(small) for _ in units[1:]))
    first = draw(st.integers(0, len(units) - 1))
    return costs, first, draw(st.integers(first, len(units) - 1))


@given(stages())
@settings(deadline=None, max_examples=200)
def test_every_option_can_be_costed_and_none_is_offered_twice(stage) -> None:  # type: ignore[no-untyped-def]
    costs, first, last = stage
    options = list(recompute_options(costs, first, last))
    assert options[0] == ()
    assert ((first, last),) in options
    assert len(set(options)) == len(options)
    plain = recomputed_cost(costs, first, last)
    for regions in options:
        cost = recomputed_cost(costs, first, last, regions)
        assert cost.seconds(ActionKind.B) >= plain.seconds(ActionKind.B)
        total = cost.seconds(ActionKind.I) + cost.seconds(ActionKind.W)
        assert total == pytest.approx(plain.backward_s + cost.recompute_s)


def test_recomputing_all_of_a_stage_lowers_its_peak() -> None:
    schedule = get_schedule("1F1B")(2, 8)
    plain = [recomputed_cost(SPLIT, 0, 1), recomputed_cost(SPLIT, 2, 3)]
    lower = [recomputed_cost(SPLIT, 0, 1, [(0, 1)]), plain[1]]
    before, after = simulate(schedule, plain), simulate(schedule, lower)
    assert after.peak_bytes[0] < before.peak_bytes[0]
    assert after.makespan_s > before.makespan_s


def test_what_stages_on_one_rank_hand_over_is_there_once() -> None:
    units = tuple(Unit(name, 1.0, 2.0, activation_bytes=10) for name in "abc")
    costs = CostModel(units, (4, 6), entry_bytes=(1, 2), exit_bytes=(3, 4))
    apart, together = (
        recomputed_cost(costs, 1, 2, shared=shared_on_rank(costs, (0, 1, 3), ranks)[1])
        for ranks in ((0, 1), (0, 0))
    )
    assert (apart.activation_bytes, together.activation_bytes) == (21, 17)
    # The first stage lets go of it in its I, and W may still need it.
    assert (apart.weight_bytes, together.weight_bytes) == (21, 21)
    assert (apart.arriving_bytes, apart.returned_gradient_bytes) == (4, 4)
    assert (together.arriving_bytes, together.returned_gradient_bytes) == (0, 0)
    assert shared_on_rank(costs, (0, 3), (0,)) == [NOTHING_SHARED]
