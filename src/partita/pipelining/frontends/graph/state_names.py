"""The names under which stages hold a model's parameters and buffers: together they have all of the
model's.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from partita._torch.modules.contents import is_buffer, is_persistent_buffer, named_state
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
        for tensor in [held for _, held in named_state(stage)]:
            for name in aliases.get(id(tensor), ()):
                _hold(stage, whole, name)


def add_unused(whole: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Put what no stage uses into the stage that holds its closest relatives, so that nothing is lost."""
    held = [(name, stage) for stage in stages for name, _ in named_state(stage)]
    known = {name for name, _ in held}
    for name, _ in named_state(whole):
        if name not in known:
            _, nearest = max(held, key=lambda item: shared_atoms(item[0], name), default=("", stages[0]))
            _hold(nearest, whole, name)


def _hold(stage: nn.Module, whole: nn.Module, name: str) -> None:
    """Register the whole model's tensor of that name in the stage, unless it is there."""
    *path, leaf = name.split(".")
    source, module = whole, stage
    for atom in path:
        source = source.get_submodule(atom)
        child = getattr(module, atom, None)
        if child is None:
            child = nn.Module().train(source.training)
            module.add_module(atom, child)
        module = child
    if hasattr(module, leaf):
        return
    tensor = getattr(source, leaf)
    if is_buffer(source, leaf):
        module.register_buffer(leaf, tensor, persistent=is_persistent_buffer(source, leaf))
    else:
        module.register_parameter(leaf, tensor)
