from __future__ import annotations

import dataclasses
import json

import pytest

from partita.errors import PlanError
from partita.planning import Cluster, CostModel, TiedUnits, Unit, plan_stages, search
from partita.planning.costs.shared_on_rank import shared_on_rank


def model() -> CostModel:
    units = (
        Unit("a", 1.0, 2.0, parameter_bytes=8, parameters=2, activation_bytes=4, modules=("x", "y")),
        Unit("b", 0.5, 1.0, backward_input_s=0.25, backward_weight_s=0.75),
    )
    return CostModel(units, (16,), crossing_grad_bytes=(32,), borders=frozenset({0}))


def test_a_cost_model_survives_json() -> None:
    assert CostModel.from_json(model().to_json()) == model()


def test_gradients_are_as_large_as_values_where_nothing_else_is_said() -> None:
    assert CostModel(model().units, (16,)).gradient_bytes == (16,)
    assert model().gradient_bytes == (32,)


def test_a_file_that_was_written_before_there_were_entries_and_spreads_is_still_read() -> None:
    data = json.loads(model().to_json())
    for unit in data["units"]:
        for new in (
            "spread",
            "weight_activation_bytes",
            "forward_workspace_bytes",
            "backward_workspace_bytes",
        ):
            del unit[new]
    del data["entry_bytes"], data["exit_bytes"]
    assert CostModel.from_json(json.dumps(data)) == model()


def test_a_stage_keeps_what_enters_and_leaves_it_too() -> None:
    units = tuple(Unit(name, 1.0, 2.0, activation_bytes=10, weight_activation_bytes=12) for name in "abc")
    costs = CostModel(units, (4, 4), entry_bytes=(1, 2), exit_bytes=(3, 4))
    assert [costs.kept_bytes(0, 0), costs.kept_bytes(1, 1), costs.kept_bytes(2, 2)] == [13, 15, 12]
    assert costs.kept_bytes(0, 2) == 30
    assert costs.left_bytes(1, 2) == 25
    assert CostModel(units, (4, 4)).kept_bytes(1, 1) == 10


def test_where_the_models_inputs_need_no_gradient_w_of_the_first_stage_does_all() -> None:
    first = Unit("a", 1.0, 2.0, activation_bytes=5, backward_input_s=0.0, backward_weight_s=2.0)
    other = Unit("b", 1.0, 3.0, activation_bytes=5, backward_input_s=1.0, backward_weight_s=2.5)
    other = dataclasses.replace(other, weight_activation_bytes=9)
    costs = CostModel((first, other), (4,))
    assert costs.split_backward_s(0, 1) == (0.0, 5.0)
    assert costs.split_backward_s(1, 1) == (1.0, 2.5)
    assert (costs.left_bytes(0, 1), costs.left_bytes(1, 1)) == (10, 9)
    frozen = Unit("z", 1.0, 0.0, backward_input_s=0.0, backward_weight_s=0.0)
    assert CostModel((frozen, other), (4,)).split_backward_s(0, 1) == (1.0, 2.5)
    assert CostModel((frozen, first, other), (4, 4)).split_backward_s(0, 2) == (0.0, 5.0)
    assert CostModel((Unit("a", 1.0, 2.0), other), (4,)).split_backward_s(0, 1) is None


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(PlanError, match=r"forward_s of unit 'a' is -1.0: give a finite number of seconds"):
        Unit("a", -1.0, 0.0)


def test_a_time_that_is_no_number_is_refused() -> None:
    with pytest.raises(PlanError, match="backward_s of unit 'a' is nan"):
        Unit("a", 1.0, float("nan"))


def test_a_size_that_is_not_whole_is_refused() -> None:
    with pytest.raises(PlanError, match=r"activation_bytes of unit 'a' is 1.5: give a whole number"):
        Unit("a", 1.0, 1.0, activation_bytes=1.5)  # type: ignore[arg-type]


def test_half_of_a_split_backward_is_refused() -> None:
    with pytest.raises(PlanError, match="unit 'a' has one of backward_input_s and backward_weight_s"):
        Unit("a", 1.0, 1.0, backward_input_s=0.5)


def test_two_units_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match="two units are named 'a'"):
        CostModel((Unit("a", 1.0, 1.0), Unit("a", 1.0, 1.0)), (0,))


def test_no_units_are_refused() -> None:
    with pytest.raises(PlanError, match="the number of units is 0"):
        CostModel((), ())


def test_crossings_must_match_the_units() -> None:
    with pytest.raises(PlanError, match="crossing_bytes has 2 numbers for 1 units: give 0"):
        CostModel((Unit("a", 1.0, 1.0),), (1, 2))


def test_a_border_must_exist() -> None:
    with pytest.raises(PlanError, match="border 1 does not exist: 2 units have borders 0 to 0"):
        CostModel((Unit("a", 1.0, 1.0), Unit("b", 1.0, 1.0)), (0,), borders=frozenset({1}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format="other"), "the format is 'other', expected 'partita.costs'"),
        (lambda data: data.update(version=99), r"partita\.costs version 99 can't be read, only 1"),
        (lambda data: data.pop("units"), "CostModel misses the field 'units'"),
        (lambda data: data.update(extra=1), "CostModel has the unknown field 'extra'"),
        (
            lambda data: data["units"][1].update(forward_s="fast"),
            r"CostModel.units\[1\].forward_s is 'fast': give a number, or save it again",
        ),
        (
            lambda data: data["units"][0].update(parameters=True),
            r"CostModel.units\[0\].parameters is True: give a whole number",
        ),
        (lambda data: data["units"].append(3), r"CostModel.units\[2\] is 3: expected an object"),
        (lambda data: data.update(crossing_bytes=5), r"CostModel.crossing_bytes is 5: give a list"),
    ],
)
def test_a_malformed_file_is_an_error_that_says_where(change, message: str) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(model().to_json())
    change(data)
    with pytest.raises(PlanError, match=message):
        CostModel.from_json(json.dumps(data))


def test_an_integer_that_no_float_can_hold_is_an_error() -> None:
    data = json.loads(model().to_json())
    data["units"][0]["forward_s"] = 10**400
    with pytest.raises(PlanError, match=r"units\[0\]\.forward_s is 10+: give a number"):
        CostModel.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_text_that_is_not_json_is_an_error(text: str) -> None:
    with pytest.raises(PlanError, match="this is not JSON"):
        CostModel.from_json(text)


def test_json_that_is_no_object_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"expected a JSON object .*, found list"):
        CostModel.from_json("[]")


def test_messages_are_counted_where_it_is_known_what_crosses() -> None:
    units = tuple(Unit(name, 1.0, 2.0) for name in "abc")
    known = CostModel(units, (5, 7), crossing_grad_bytes=(50, 70), entry_bytes=(0, 0), exit_bytes=(0, 0))
    assert [known.messages(at, at) for at in range(3)] == [(0, 0, 50), (5, 50, 70), (7, 70, 0)]
    assert known.messages(0, 2) == (0, 0, 0)
    shared = [shared_on_rank(known, (0, 1, 2, 3), ranks)[1] for ranks in ((0, 0, 1), (0, 1, 1))]
    assert [known.messages(1, 1, same) for same in shared] == [(0, 0, 70), (5, 50, 0)]
    assert CostModel(units, (5, 7)).messages(1, 1) == (0, 0, 0)


def tied_model() -> CostModel:
    """Four units; the first and the last have a matrix of 8 bytes in common, and each 2 of its own."""
    units = tuple(Unit(name, 1.0, 2.0, parameter_bytes=10, parameters=5) for name in "abcd")
    return CostModel(units, (4, 4, 4), tied=(TiedUnits((0, 3), parameter_bytes=8, parameters=4),))


def test_a_stage_counts_tied_parameters_once_and_every_stage_that_holds_them_does() -> None:
    """An embedding tied to the head was counted twice on one rank, with gradients and optimizer state."""
    costs = tied_model()
    assert CostModel.from_json(costs.to_json()) == costs
    (whole,) = plan_stages(costs, stages=1, schedule="GPipe").stages
    assert (whole.parameter_bytes, whole.parameters) == (32, 16)
    halves = plan_stages(costs, stages=2, schedule="GPipe").stages
    assert [stage.parameter_bytes for stage in halves] == [20, 20]


def test_what_fits_once_tied_parameters_count_once_is_planned() -> None:
    one = Cluster(1, memory_bytes=4 * 32)
    assert max(search(tied_model(), one, microbatches=1)[0].peak_bytes) == 4 * 32
    assert plan_stages(tied_model(), stages=1, schedule="GPipe", cluster=one).stages[0].peak_bytes == 4 * 32


@pytest.mark.parametrize("units", [(0,), (3, 0), (0, 0)])
def test_tied_parameters_are_those_of_several_units(units: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="give two or more, each once, in order"):
        TiedUnits(units, parameter_bytes=1)


@pytest.mark.parametrize("tied", [TiedUnits((0, 4), 1), TiedUnits((0, 3), 11)])
def test_tied_parameters_are_in_their_units(tied: TiedUnits) -> None:
    with pytest.raises(PlanError, match="does not exist or has fewer bytes: give units that count them"):
        CostModel(tied_model().units, (4, 4, 4), tied=(tied,))
