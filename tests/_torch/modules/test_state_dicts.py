from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

from partita._torch.modules.state_dicts import (
    changes_state_dict,
    state_dict_hooks,
    with_values,
    without,
)


class _Saves(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach()


def test_versions_of_modules_stay_with_a_state_dict_that_is_copied() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert list(without(state, ["weight", "bias"])) == [*state][2:]
    for copied in (without(state, ["bias"]), with_values(state, {"bias": torch.ones(2)})):
        module = nn.BatchNorm1d(2)
        assert copied["num_batches_tracked"] is state["num_batches_tracked"]
        del copied["num_batches_tracked"]  # of version 2, which does not add it as for an older one
        with pytest.raises(RuntimeError, match="num_batches_tracked"):
            module.load_state_dict(copied)
    assert "weight" not in with_values({}, {})


def test_hooks_and_methods_of_users_change_a_state_dict_and_those_of_torch_do_not() -> None:
    hooked = nn.Linear(2, 2)
    hooked.register_state_dict_post_hook(lambda *_: None)
    assert changes_state_dict(hooked)
    assert changes_state_dict(_Saves(2, 2))
    assert not changes_state_dict(spectral_norm(nn.Linear(2, 2)))
    assert vars(hooked).keys() >= {*state_dict_hooks}


def test_a_method_of_one_module_changes_its_state_dict() -> None:
    module = nn.Linear(2, 2)
    whole = module.state_dict
    vars(module)["state_dict"] = lambda **options: {
        f"n.{name}": value for name, value in whole(**options).items()
    }
    assert changes_state_dict(module)
