"""A model without its dropout, whatever library it is from."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["draws", "still"]

_RATES = ("drop", "jitter")
"""What names of rates contain."""


def draws(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether a call of the model, in the mode that it is in, draws random numbers."""
    before = torch.get_rng_state()
    with torch.no_grad(), torch.random.fork_rng():
        copy.deepcopy(model)(**inputs)
        return not torch.equal(before, torch.get_rng_state())


def still(model: nn.Module) -> nn.Module:
    """A copy in which all rates of dropout, of dropped layers, paths and noise are 0."""
    quiet = copy.deepcopy(model)
    for owner in _owners(quiet):
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and (
                any(word in name for word in _RATES) or (name == "p" and isinstance(owner, nn.Module))
            ):
                object.__setattr__(owner, name, 0.0)
    return quiet


def _owners(model: nn.Module) -> Iterator[object]:
    """The modules, and their configurations with those inside of these."""
    waiting: list[object] = []
    for module in model.modules():
        yield module
        waiting.append(getattr(module, "config", None))
    seen: set[int] = set()
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not hasattr(config, "to_dict") or isinstance(config, dict):
            continue
        seen.add(id(config))
        yield config
        waiting += vars(config).values()
