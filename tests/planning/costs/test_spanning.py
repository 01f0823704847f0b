from __future__ import annotations

import dataclasses

import pytest

from partita.errors import PlanError
from partita.planning import CostModel, Unit
from partita.planning.costs.shared_on_rank import shared_on_rank
from partita.planning.costs.spanning import SpanningValue, SpanningView
from partita.planning.costs.workspaces import workspaces


def across(keeper: int | None = 0) -> CostModel:
    """Each unit hands 1 byte to the next one, and the first one hands 100 to the last, past the others."""
    units = tuple(
        Unit(name, 1.0, 2.0, activation_bytes=10, backward_workspace_bytes=20 - index)
        for index, name in enumerate("abcd")
    )
    entry, leave = (101,) * 3, (0,) * 3
    past = SpanningValue(100, 100, 0, (3,), keeper)
    return CostModel(units, (101,) * 3, entry_bytes=entry, exit_bytes=leave, spanning=(past,))


def test_a_value_that_goes_past_a_stage_is_neither_kept_nor_sent_there() -> None:
    costs = across()
    assert [costs.kept_bytes(*ends) for ends in ((0, 0), (1, 2), (2, 2), (3, 3))] == [10, 21, 11, 111]
    assert [costs.sent_bytes(at, at) for at in range(4)] == [101, 1, 1, 0]
    assert [costs.sent_gradient_bytes(at, at) for at in range(4)] == [0, 1, 1, 101]
    assert [costs.received_gradient_bytes(at, at) for at in range(4)] == [101, 1, 1, 0]
    assert [costs.entering_bytes(*ends) for ends in ((0, 3), (1, 2), (1, 3))] == [0, 1, 101]
    assert costs.messages(1, 2) == (1, 1, 1)


def test_a_value_that_goes_past_a_stage_is_not_left_to_its_w() -> None:
    """A stage of one small unit was planned to leave the skips around it to its W."""
    costs = dataclasses.replace(across(), entry_left_bytes=(101, 101, 101))
    units = sum(unit.weight_bytes for unit in costs.units[1:3])
    assert costs.left_bytes(1, 2) == units + 1
    assert costs.left_bytes(3, 3) == costs.units[3].weight_bytes + 101


def test_of_a_view_that_goes_past_no_more_is_left_out_than_crosses() -> None:
    """The memory of a view of 50 bytes was left out as a whole, and a stage seemed to send nothing."""
    views = (SpanningView(50, 20, 0, 3), SpanningView(10, 0, 0, 1))  # the second is used by unit 1 alone
    past = SpanningValue(100, 100, 0, (3,), 0, views)
    costs = dataclasses.replace(
        across(), crossing_bytes=(61, 51, 51), crossing_grad_bytes=(21,) * 3, spanning=(past,)
    )
    assert [costs.sent_bytes(at, at) for at in range(4)] == [61, 1, 1, 0]
    assert [costs.sent_gradient_bytes(at, at) for at in range(4)] == [0, 1, 1, 21]
    assert [costs.received_gradient_bytes(at, at) for at in range(4)] == [21, 1, 1, 0]
    assert (costs.entering_bytes(2, 3), costs.messages(2, 2)) == (51, (1, 1, 1))
    assert shared_on_rank(costs, (0, 1, 2, 3, 4), (0, 1, 1, 0))[3][:4] == (50, 20, 0, 0)
    assert CostModel.from_json(costs.to_json()) == costs


def test_a_view_has_no_negative_size() -> None:
    with pytest.raises(PlanError, match="bytes of a view is -1"):
        SpanningView(-1, 0, 0, 1)
    with pytest.raises(PlanError, match="gradient_bytes of a view is -1"):
        SpanningView(1, -1, 0, 1)


def test_the_first_stage_sends_the_models_inputs_on() -> None:
    costs = dataclasses.replace(across(), spanning=(SpanningValue(100, 0, -1, (3,)),))
    assert costs.sent_bytes(0, 1) == 101
    assert costs.kept_bytes(0, 1) == 20
    assert (costs.entering_bytes(2, 2), costs.entering_bytes(2, 3)) == (1, 101)


def test_gradients_of_what_goes_past_a_unit_are_there_while_its_backward_pass_runs() -> None:
    costs = across()
    alone, first_half, second_half = (workspaces(costs, *ends)[1] for ends in ((1, 2), (0, 2), (1, 3)))
    assert alone == 18  # unit 1 has 19, and what unit 2 keeps is no longer there
    assert first_half == 18 + 100  # sent by the stage behind
    assert second_half == 18 + 100 - 10  # computed by unit 3
    kept_by_nobody = across(None)
    assert workspaces(kept_by_nobody, 0, 3)[0] == 100 - 10
    assert workspaces(kept_by_nobody, 0, 2)[0] == 0  # the exit of the border counts it


def test_spanning_values_survive_json_and_are_checked() -> None:
    costs = across()
    assert CostModel.from_json(costs.to_json()) == costs
    with pytest.raises(PlanError, match=r"made by unit 2 and used by \(1, 3\): give its users in order"):
        SpanningValue(1, 1, 2, (1, 3))
    with pytest.raises(PlanError, match=r"made by unit -2 and used by \(1,\)"):
        SpanningValue(1, 1, -2, (1,))
    with pytest.raises(PlanError, match="used by unit 4: there are units 0 to 3"):
        dataclasses.replace(costs, spanning=(SpanningValue(1, 1, 0, (4,)),))
