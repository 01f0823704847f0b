from __future__ import annotations

import pytest

from partita.errors import PlanError
from partita.planning import CostedFor, CostModel, Unit, costs_for_device, get_device

UNITS = (
    Unit("a", 3.12, 6.24, parameter_bytes=8, backward_input_s=3.0, backward_weight_s=3.24),
    Unit("b", 1.0, 2.0, activation_bytes=4),
)
OF_A100 = CostModel(UNITS, (16,), costed_for=CostedFor("A100", "bfloat16", 312e12))


def test_all_seconds_are_those_of_the_other_device_and_nothing_else_changes() -> None:
    costs = costs_for_device(OF_A100, get_device("H100"))
    speed = 989.5 / 312
    assert costs.costed_for == CostedFor("H100", "bfloat16", 989.5e12)
    first, second = costs.units
    seconds = first.forward_s, first.backward_s, first.backward_input_s, first.backward_weight_s
    assert seconds == pytest.approx([second / speed for second in (3.12, 6.24, 3.0, 3.24)])
    assert (second.forward_s, second.backward_input_s) == (pytest.approx(1 / speed), None)
    sizes = [(unit.parameter_bytes, unit.activation_bytes) for unit in costs.units]
    assert (sizes, costs.crossing_bytes) == ([(8, 0), (0, 4)], (16,))


def test_there_and_back_are_the_same_costs_and_they_survive_json() -> None:
    back = costs_for_device(costs_for_device(OF_A100, get_device("B200")), get_device("A100"))
    assert [unit.forward_s for unit in back.units] == pytest.approx([unit.forward_s for unit in UNITS])
    assert CostModel.from_json(OF_A100.to_json()) == OF_A100


def test_measured_costs_are_for_no_device() -> None:
    with pytest.raises(PlanError, match=r"do not say which device .* what they are on 'B200' is not known"):
        costs_for_device(CostModel(UNITS, (16,)), get_device("B200"))
