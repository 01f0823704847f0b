"""Names of parameters and buffers in the stages: together they have every name of the whole model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from partita._torch.modules.contents import named_state
from partita._torch.modules.registered_state import register_as_in
from partita.listing import shared_atoms

__all__ = ["add_aliases", "add_unused"]


def add_aliases(whole: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Give a stage that holds one name of a tied parameter all of its names, so that a checkpoint of the
    whole model, which has every name, can be put together from the stages.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in named_state(whole):
        names.setdefault(id(tensor), []).append(name)
    aliases = {identity: group for identity, group in names.items() if len(group) > 1}
    for stage in stages:
        for tensor in [tensor for _, tensor in named_state(stage)]:
            for name in aliases.get(id(tensor), ()):
                register_as_in(whole, stage, name)


def add_unused(whole: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Register each tensor that no stage uses, under whichever name, in the stage that holds the one with the
    most similar name.
    """
    in_stages = [(name, stage) for stage in stages for name, _ in named_state(stage)]
    there = {id(tensor) for stage in stages for _, tensor in named_state(stage)}
    for name, tensor in named_state(whole):
        if id(tensor) not in there:
            there.add(id(tensor))
            _, nearest = max(in_stages, key=lambda item: shared_atoms(item[0], name), default=("", stages[0]))
            register_as_in(whole, nearest, name)
