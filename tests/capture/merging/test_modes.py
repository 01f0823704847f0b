from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

from partita.capture.merging.modes import copy_flags, in_mode, mode_flag, require_mode
from partita.errors import CaptureError


def test_in_mode_gives_every_module_its_own_flag_back_also_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()

    def fail() -> None:
        with in_mode(model, False):
            assert not any(child.training for child in model.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [child.training for child in model.modules()] == [True, True, False, False]


def test_a_flag_node_is_made_once_and_follows_its_module() -> None:
    module = symbolic_trace(nn.Sequential(nn.ReLU()))
    flag = mode_flag(module, "deep.inner")
    assert mode_flag(module, "deep.inner") is flag
    assert mode_flag(module, "").target == "training"
    module.eval()
    assert module.get_submodule("deep.inner").training is False


def test_flags_are_copied_by_name_and_new_modules_follow_the_model() -> None:
    model, module = nn.Sequential(nn.ReLU(), nn.ReLU()).eval(), nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())
    model[1].train()
    copy_flags(model, module)
    assert [child.training for child in module.modules()] == [False, False, True, False]


def test_the_other_mode_is_refused_and_its_own_is_not() -> None:
    require_mode(True, True)
    require_mode(False, False)
    with pytest.raises(CaptureError, match=r"captured in eval mode and can't run in train mode"):
        require_mode(True, False)


def test_a_flag_survives_in_a_graph_without_nodes_that_use_it() -> None:
    module = symbolic_trace(nn.ReLU())
    mode_flag(module, "")
    module.graph.lint()
    module.recompile()
    assert torch.equal(module(torch.ones(1)), torch.ones(1))
