"""The gradient that all copies of a tied parameter get at the end of a step.

In each microbatch the gradient travels along the stages that hold the parameter, last first; each adds its
share, and the first, the owner, has the sum. At the end of a step the owner sends it to the others, so that
optimizers keep the copies equal. (``tied_sum`` does it with one message a step.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from partita._torch.autograd.running_pass import has_hooks
from partita.errors import ExecutionError
from partita.pipelining.interface.routes import Routes
from partita.pipelining.stages.stage import Stage
from partita.runtime import Comm, Handle, wait_all

__all__ = ["share_gradients"]

_TIED_TAGS = 2**30
"""Far above the tags of values that cross."""


def share_gradients(
    comm: Comm, stages: Mapping[int, Stage], stage_ranks: tuple[int, ...], routes: Routes
) -> None:
    """At the end of a step, give every copy of a tied parameter the gradient that its owner has summed."""
    handles: list[Handle] = []
    received: list[_Receive] = []
    for number, group in enumerate(routes.tied):
        if not group.value.requires_grad or not group.chained:
            continue
        owner, *holders = group.stages
        tag = _TIED_TAGS + 2 * number
        for holder in holders:
            source, destination = stage_ranks[owner], stage_ranks[holder]
            if source == destination == comm.rank:
                copies = stages[owner].parameter(group), stages[holder].parameter(group)
                _copy_gradient(*copies, group.names[0])
            elif source == comm.rank:
                handles += _send(comm, stages[owner].parameter(group), destination, tag)
            elif destination == comm.rank:
                received.append(_Receive(stages[holder].parameter(group), group.names[0]))
                handles += received[-1].start(comm, source, tag)
    wait_all(handles)
    for message in received:
        message.finish()


def _copy_gradient(owner: nn.Parameter, holder: nn.Parameter, name: str) -> None:
    """Copy between stages of one rank, unless both hold the same object (they don't after a move)."""
    if holder is owner:
        return
    _check_hooks(holder, has_hooks(owner), name)
    holder.grad = None if owner.grad is None else owner.grad.clone()


def _check_hooks(holder: nn.Parameter, owner_has_some: bool, name: str) -> None:
    """Refuse hooks that would never run: they run on the owner's copy, where the whole gradient is."""
    if has_hooks(holder) and not owner_has_some:
        raise ExecutionError(
            f"the tied parameter {name!r} has hooks in a later stage and none in the first that holds it, "
            "whose hooks are the ones that run: register them on every stage's copy"
        )


_HAS_GRADIENT, _HAS_HOOKS = 1, 2


def _send(comm: Comm, parameter: nn.Parameter, destination: int, tag: int) -> list[Handle]:
    """Start sending whether there are a gradient and hooks, and the gradient (zeros where there is none)."""
    flags = _HAS_GRADIENT * (parameter.grad is not None) + _HAS_HOOKS * has_hooks(parameter)
    header = torch.tensor([flags], dtype=torch.uint8, device=parameter.device)
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return [comm.send(header, destination, tag), comm.send(gradient, destination, tag + 1)]


class _Receive:
    """Receives what `_send` sends."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        self._parameter = parameter
        self._name = name
        self._header = torch.empty(1, dtype=torch.uint8, device=parameter.device)
        self._gradient = torch.empty_like(parameter, requires_grad=False)

    def start(self, comm: Comm, source: int, tag: int) -> list[Handle]:
        return [comm.recv(self._header, source, tag), comm.recv(self._gradient, source, tag + 1)]

    def finish(self) -> None:
        flags = int(self._header.item())
        _check_hooks(self._parameter, bool(flags & _HAS_HOOKS), self._name)
        self._parameter.grad = self._gradient if flags & _HAS_GRADIENT else None
