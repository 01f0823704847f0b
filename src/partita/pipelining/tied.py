"""Parameters that several stages hold: who they are, and how their gradients come together.

Each microbatch's shares travel along the chain of holders, last first, and are added up by the first: the
owner. At the end of a step the owner gives the sum to all others, so an optimizer keeps the copies equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from partita.pipelining.routes import Routes, Tied, Value
from partita.pipelining.stage import PipelineStage
from partita.runtime import Comm, Handle

__all__ = ["share_gradients", "tied_parameters"]

_TIED_TAGS = 2**30
"""Far above the tags of values that cross."""


def tied_parameters(modules: Sequence[nn.Module]) -> tuple[Tied, ...]:
    """The parameters that more than one stage holds; equal are those that are the same object."""
    holders: dict[int, tuple[nn.Parameter, dict[str, None], dict[int, None]]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            _, names, stages = holders.setdefault(id(parameter), (parameter, {}, {}))
            names[name] = None
            stages[stage] = None
    return tuple(
        Tied(tuple(names), tuple(stages), Value.of(f"parameter:{next(iter(names))}", parameter))
        for parameter, names, stages in holders.values()
        if len(stages) > 1
    )


def share_gradients(
    comm: Comm, stages: Mapping[int, PipelineStage], stage_ranks: tuple[int, ...], routes: Routes
) -> None:
    """Give every holder of a tied parameter the gradient that its owner has summed, at the end of a step."""
    handles: list[Handle] = []
    received: list[_Received] = []
    for number, group in enumerate(routes.tied):
        if not group.value.requires_grad:
            continue
        owner, *holders = group.stages
        tag = _TIED_TAGS + 2 * number
        for holder in holders:
            source, destination = stage_ranks[owner], stage_ranks[holder]
            if source == destination == comm.rank:
                _copy_gradient(stages[owner].parameter(group), stages[holder].parameter(group))
            elif source == comm.rank:
                handles += _send(comm, stages[owner].parameter(group), destination, tag)
            elif destination == comm.rank:
                received.append(_Received(stages[holder].parameter(group)))
                handles += received[-1].start(comm, source, tag)
    for handle in handles:
        handle.wait()
    for message in received:
        message.finish()


def _copy_gradient(owner: nn.Parameter, holder: nn.Parameter) -> None:
    """On one rank two stages hold one object or (after a copy or a move) two."""
    if holder is not owner:
        holder.grad = None if owner.grad is None else owner.grad.clone()


def _send(comm: Comm, parameter: nn.Parameter, destination: int, tag: int) -> list[Handle]:
    """Whether there is a gradient, and the gradient (zeros where there is none)."""
    there = torch.tensor([parameter.grad is not None], device=parameter.device)
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return [comm.send(there, destination, tag), comm.send(gradient, destination, tag + 1)]


class _Received:
    """The other side of `_send`."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._there = torch.empty(1, dtype=torch.bool, device=parameter.device)
        self._gradient = torch.empty_like(parameter, requires_grad=False)

    def start(self, comm: Comm, source: int, tag: int) -> list[Handle]:
        return [comm.recv(self._there, source, tag), comm.recv(self._gradient, source, tag + 1)]

    def finish(self) -> None:
        self._parameter.grad = self._gradient if self._there.item() else None
