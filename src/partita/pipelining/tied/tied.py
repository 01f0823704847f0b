"""Parameters that several stages hold: who they are, and how their gradients come together.

Each microbatch's shares travel along the chain of holders, last first, and are added up by the first: the
owner. At the end of a step the owner gives the sum to all others, so an optimizer keeps the copies equal.
(Another way, with one message a step: ``tied_sum``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from partita._torch.autograd.running_pass import has_hooks
from partita.errors import ExecutionError
from partita.pipelining.interface.routes import Routes, Tied, Value
from partita.pipelining.stages.stage import Stage
from partita.runtime import Comm, Handle, wait_all

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
    comm: Comm, stages: Mapping[int, Stage], stage_ranks: tuple[int, ...], routes: Routes
) -> None:
    """Give every holder of a tied parameter the gradient that its owner has summed, at the end of a step."""
    handles: list[Handle] = []
    received: list[_Received] = []
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
                received.append(_Received(stages[holder].parameter(group), group.names[0]))
                handles += received[-1].start(comm, source, tag)
    wait_all(handles)
    for message in received:
        message.finish()


def _copy_gradient(owner: nn.Parameter, holder: nn.Parameter, name: str) -> None:
    """On one rank two stages hold one object or (after a copy or a move) two."""
    if holder is owner:
        return
    _check_hooks(holder, has_hooks(owner), name)
    holder.grad = None if owner.grad is None else owner.grad.clone()


def _check_hooks(holder: nn.Parameter, owner_has_some: bool, name: str) -> None:
    """Hooks run where the whole gradient is: at the owner. On another copy alone they would never run."""
    if has_hooks(holder) and not owner_has_some:
        raise ExecutionError(
            f"the tied parameter {name!r} has hooks in a later stage and none in the first that holds it, "
            "whose hooks are the ones that run: register them on every stage's copy"
        )


_THERE, _HOOKED = 1, 2


def _send(comm: Comm, parameter: nn.Parameter, destination: int, tag: int) -> list[Handle]:
    """Whether there is a gradient (and hooks), and the gradient (zeros where there is none)."""
    flags = _THERE * (parameter.grad is not None) + _HOOKED * has_hooks(parameter)
    about = torch.tensor([flags], dtype=torch.uint8, device=parameter.device)
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return [comm.send(about, destination, tag), comm.send(gradient, destination, tag + 1)]


class _Received:
    """The other side of `_send`."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        self._parameter = parameter
        self._name = name
        self._about = torch.empty(1, dtype=torch.uint8, device=parameter.device)
        self._gradient = torch.empty_like(parameter, requires_grad=False)

    def start(self, comm: Comm, source: int, tag: int) -> list[Handle]:
        return [comm.recv(self._about, source, tag), comm.recv(self._gradient, source, tag + 1)]

    def finish(self) -> None:
        flags = int(self._about.item())
        _check_hooks(self._parameter, bool(flags & _HOOKED), self._name)
        self._parameter.grad = self._gradient if flags & _THERE else None
