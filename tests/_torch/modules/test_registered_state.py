from __future__ import annotations

import torch
from torch import nn

from partita._torch.modules.registered_state import register_missing


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
