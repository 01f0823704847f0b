from __future__ import annotations

import torch
from torch import nn

from partita._torch.modules.registered_state import order_as_in, register_missing


def test_what_is_missing_is_registered_as_it_is_and_the_rest_stays() -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.Module().eval())
    source[1].register_buffer("kept", torch.ones(1))
    source[1].register_buffer("passing", torch.ones(1), persistent=False)
    source[1].tied = source[0].weight
    module = nn.Module()
    module.add_module("0", nn.Linear(2, 2))
    own = module.get_submodule("0").weight
    register_missing(source, module)
    assert module.get_submodule("0").weight is own
    made = module.get_submodule("1")
    assert not made.training
    assert made.kept is source[1].kept
    assert made.tied is source[0].weight
    assert module.state_dict().keys() == source.state_dict().keys()
    assert dict(module.named_buffers()).keys() == {"1.kept", "1.passing"}


def test_state_is_put_into_the_order_of_another_module_and_shared_modules_stay() -> None:
    source = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.Linear(2, 2), "shared": nn.Linear(2, 2)})
    module = nn.Module()
    module.add_module("mine", nn.Tanh())
    module.add_module("shared", source["shared"])
    for name in ("b", "a"):
        child = nn.Module()
        for key, value in reversed(list(source[name].named_parameters())):
            child.register_parameter(key, value)
        module.add_module(name, child)
    order_as_in(source, module)
    assert [name for name, _ in module.named_children()] == ["a", "b", "shared", "mine"]
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in source.named_parameters()]
    assert module.shared is source["shared"]
