"""What a module holds beyond its documented iterators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partita._torch.modules.contents import (
    has_forward_hooks,
    is_guards_module,
    is_persistent_buffer,
    modules_in,
    own_hooks,
    parameters_in,
    registries,
)


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_a_hook_is_seen(register: str) -> None:
    module = nn.Linear(2, 2)
    assert not has_forward_hooks(module)
    handle = getattr(module, register)(lambda *_: None)
    assert has_forward_hooks(module)
    handle.remove()
    assert not has_forward_hooks(module)


def test_a_forward_on_the_instance_counts_as_a_hook() -> None:
    module = nn.Linear(2, 2)
    module.forward = torch.sin  # type: ignore[method-assign]
    assert has_forward_hooks(module)


def test_a_buffer_outside_the_state_dict_is_told_apart() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert is_persistent_buffer(module, "kept")
    assert not is_persistent_buffer(module, "scratch")
    assert not is_persistent_buffer(module, "other")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_input_checks_of_an_exported_program_are_recognised() -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)).module()
    names = [name for name, module in program.named_modules() if is_guards_module(module)]
    assert names == ["_guards_fn"]


def test_registries_are_those_in_use() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    module[0].weight = nn.Parameter(torch.zeros(2))
    names = [name for registry in registries(module) for name in registry]
    assert names == ["0", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert any(module[0].weight is value for registry in registries(module) for value in registry.values())


def test_the_hooks_of_a_module_are_its_own_and_not_those_of_its_children() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(print)
    assert list(own_hooks(module)) == []
    module.register_full_backward_hook(print)
    module.register_forward_pre_hook(print)
    assert list(own_hooks(module)) == [print, print]


def test_modules_come_with_the_names_and_in_the_order_of_torch() -> None:
    shared = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    model = nn.ModuleDict(
        {"a": nn.Sequential(shared, nn.Tanh()), "b": shared, "c": nn.ModuleList([shared[0]])}
    )
    model["c"].absent = None
    model["a"].register_module("none", None)
    model["a"].again = model["c"]
    for module in (model, nn.Linear(1, 1), nn.TransformerEncoderLayer(4, 2), nn.DataParallel(model)):
        assert [(name, part) for part, name in modules_in(module).items()] == [*module.named_modules()]
        state = dict(module.named_parameters(remove_duplicate=False))
        assert dict(parameters_in(module)).keys() <= state.keys()
        assert {*dict(parameters_in(module)).values()} == {*module.parameters()}
