from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from partita._torch.fake.absent_state import asked_for_no_state, save_nothing_of_its_own


class _Saves(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach()


def test_a_class_with_a_way_of_its_own_to_save_saves_nothing_where_it_has_no_tensors() -> None:
    one, other = _Saves(2, 2), nn.Linear(2, 2)
    for module in (one, other):
        save_nothing_of_its_own(module)
    assert not one.state_dict()
    assert list(other.state_dict()) == ["weight", "bias"]


def test_a_module_that_is_not_asked_takes_nothing_and_misses_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_load_state_dict_pre_hook(lambda *_: pytest.fail("asked"))
    before, weight = model[0].weight.clone(), torch.ones(2, 2)
    with asked_for_no_state([model[0]]):
        model.load_state_dict({"1.weight": weight, "1.bias": weight[0], "0.weight": weight})
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[1].weight, weight)
    assert "_load_from_state_dict" not in vars(model[0])
