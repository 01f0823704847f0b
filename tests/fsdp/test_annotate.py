from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._dynamo_utils import _annotate_modules_for_dynamo

from partita.fsdp import annotate_modules_for_dynamo


def managed(module: nn.Module) -> bool:
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def graphs_of(module: nn.Module) -> int:
    """How many graphs torch.compile makes of a module."""
    torch.compiler.reset()
    count = 0

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        nonlocal count
        count += 1
        return gm.forward

    torch.compile(module, backend=backend)(torch.ones(2, 2))
    return count


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def test_every_module_but_the_ignored_ones_and_their_children_is_marked() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    annotate_modules_for_dynamo(model, {model[1]}, use_orig_params=True)
    assert [managed(module) for module in (model, model[0], model[1], model[1][0])] == [
        True,
        True,
        False,
        False,
    ]
    assert model._fsdp_use_orig_params is True


def test_marked_modules_make_graphs_with_parameters_as_inputs() -> None:
    model = Model()
    annotate_modules_for_dynamo(model, (), use_orig_params=True)
    assert graphs_of(model) == 1


def test_use_orig_params_false_is_silent_in_torch_and_loud_here(recwarn: pytest.WarningsRecorder) -> None:
    """Torch marks the modules, and torch.compile then runs them eagerly without a word."""
    theirs, ours = Model(), Model()
    _annotate_modules_for_dynamo(theirs, set(), use_orig_params=False)
    assert not recwarn.list
    assert graphs_of(theirs) == 0
    with pytest.warns(
        UserWarning, match="use_orig_params=False: torch.compile makes no graph of such a module"
    ):
        annotate_modules_for_dynamo(ours, (), use_orig_params=False)
