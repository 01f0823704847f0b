"""Which gradients lie in one memory, and are planned once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.errors import PlanError
from partita.planning import CostModel, Unit
from partita.planning.costs.gradient_memory import CrossingGradient, SharedGradient
from partita.planning.costs.spanning import SpanningValue
from partita.planning.costs.workspaces import half_workspaces, workspaces

SKIP, ONLY = CrossingGradient(8, 0), CrossingGradient(8)


def residual(shared: tuple[SharedGradient, ...] = ()) -> CostModel:
    """The second unit and a skip past it, which the third adds to what it makes."""
    units = tuple(Unit(name, 1.0, 2.0, backward_workspace_bytes=16) for name in "abcd")
    skip = (SpanningValue(8, 8, 0, (1, 2)),)
    return CostModel(units, (8, 16, 8), entry_bytes=(0, 0, 0), spanning=skip, shared_gradients=shared)


def test_a_sum_hands_on_the_gradient_that_it_is_sent() -> None:
    """A residual sum's gradients were counted three times: as it was sent, and for both of its inputs."""
    apart = residual()
    (shared,) = (SharedGradient(2, 8, (ONLY, SKIP), ONLY),)
    once = residual((shared,))
    assert CostModel.from_json(once.to_json()) == once
    # Within the stage `c` is sent the gradient by `d`, which nobody has a second reference to.
    assert [costs.gradient_memory.past(1, 3) for costs in (apart, once)] == [8, 0]
    # A stage that ends with `c` holds on to what it was sent.
    assert [costs.gradient_memory.past(1, 2) for costs in (apart, once)] == [8, -8]
    assert [workspaces(costs, 0, 2)[1] for costs in (apart, once)] == [32, 24]


def test_to_what_was_sent_nothing_is_added_in_place() -> None:
    once = residual((SharedGradient(2, 8, (ONLY, SKIP), ONLY),))
    # What `b` returns for the skip, and the sum of it and what `c` was sent.
    assert once.gradient_memory.added(1, 2) == 16
    further = replace(once, spanning=(SpanningValue(8, 8, 0, (2, 3)),), shared_gradients=())
    assert further.gradient_memory.added(2, 2) == 16
    assert further.gradient_memory.added(2, 3) == 0


def test_a_slice_keeps_all_that_it_is_a_slice_of() -> None:
    once = residual((SharedGradient(2, 24, (SKIP,)),))
    assert once.gradient_memory.past(1, 3) == 24


def test_units_behind_all_weights_leave_nothing_to_w() -> None:
    """An activation at the end of a stage was planned to keep its result until W; nothing holds on to it."""
    units = tuple(
        Unit(name, 1.0, 2.0, activation_bytes=4, weight_activation_bytes=6, input_workspace_bytes=9,
             weight_workspace_bytes=3, backward_input_s=1.0, backward_weight_s=1.0, has_weights=name == "b")
        for name in "abc"
    )  # fmt: skip
    costs = CostModel(units, (1, 1))
    assert costs.left_by_units(0, 2) == [6, 6, 0]
    assert costs.left_by_units(0, 1) == [6, 6]
    assert costs.left_bytes(2, 2) == 0
    assert half_workspaces(costs, 1, 2) == (9, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: residual((SharedGradient(2, 8, (CrossingGradient(8, 1),)),)).gradient_memory, "there are 1"),
        (lambda: SharedGradient(2, 8, ()), "inputs of a shared gradient"),
        (lambda: CrossingGradient(-1), "bytes of a crossing gradient"),
    ],
)
def test_what_there_is_not_is_refused(wrong: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        wrong()  # type: ignore[operator]
