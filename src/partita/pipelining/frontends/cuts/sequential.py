"""A chain of modules, each of them a stage."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from partita.pipelining.frontends.cuts.cuts import pipe_split

__all__ = ["PipeSequential"]


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` that `pipeline` cuts between any two of its modules.

    >>> import torch
    >>> from partita.pipelining import pipeline
    >>> chain = PipeSequential.from_sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> pipeline(chain, (torch.zeros(1, 2),)).num_stages
    3
    """

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """The same modules (not copies) under the same names, so a state dict fits both."""
        named = sequential_instance.named_modules(remove_duplicate=False)
        children = OrderedDict((name, module) for name, module in named if name and "." not in name)
        return PipeSequential(children).train(sequential_instance.training)

    def forward(self, input: Any) -> Any:  # noqa: A002 - the name of nn.Sequential's own argument
        """Run the modules one after the other, with a mark between any two."""
        for number, module in enumerate(self):
            if number:
                pipe_split()
            input = module(input)  # noqa: A001
        return input
