from __future__ import annotations

import pytest
import torch
from torch import nn

from partita._torch.operators.roofline import FixedSpeeds
from partita.errors import PlanError
from partita.pipelining import measure_units
from partita.pipelining.measuring.costed_for import costed_for, most_common_dtype
from partita.planning import CostedFor, get_device


def test_costs_say_which_device_they_are_for() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.ReLU())
        batch = torch.empty(4, 8, dtype=torch.bfloat16)
    costs = measure_units(model, (batch,), device=get_device("A100"))
    assert costs.costed_for == CostedFor("A100", "bfloat16", 312e12)
    assert measure_units(model, (batch,)).costed_for is None


def test_a_device_is_given_by_its_name_too() -> None:
    # The text had no speeds: "'str' object has no attribute ...", raised while units were measured.
    with torch.device("meta"):
        model, batch = nn.Linear(8, 8), torch.empty(4, 8)
    assert measure_units(model, (batch,), device="a100") == measure_units(
        model, (batch,), device=get_device("A100")
    )
    with pytest.raises(PlanError, match="there is no device 'A101': use A10"):
        measure_units(model, (batch,), device="A101")


def test_a_device_without_a_name_is_called_by_its_class() -> None:
    assert costed_for([], FixedSpeeds(2.0, 1.0)) == CostedFor("FixedSpeeds", "float32", 2.0)


def test_the_dtype_of_most_numbers_counts() -> None:
    sizes = ((1000, torch.bfloat16), (10, torch.float32), (10, torch.float32))
    assert (
        most_common_dtype(nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes) == "bfloat16"
    )
    assert most_common_dtype([]) is None
