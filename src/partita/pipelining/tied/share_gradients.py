"""The gradient that all copies of a tied parameter get at the end of a step.

In each microbatch the gradient travels along the stages that hold the parameter, last first; each adds its
share, and the first, the owner, has the sum. At the end of a step the owner sends it to the others, so that
optimizers keep the copies equal. (``tied_sum`` does it with one message a step.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from partita._torch.tensors.parameters import has_hooks
from partita.errors import ExecutionError
from partita.pipelining.interface.routes import Routes, Tied
from partita.pipelining.stages.stage import Stage
from partita.pipelining.tied.equal_copies import other_values, sample_of
from partita.runtime import Comm, Handle, wait_all

__all__ = ["share_gradients"]

_TIED_TAGS = 2**30
"""Far above the tags of values that cross."""


def share_gradients(
    comm: Comm, stages: Mapping[int, Stage], stage_ranks: tuple[int, ...], routes: Routes, step: int
) -> None:
    """At the end of a step, give every copy of a tied parameter the gradient that its owner has summed.

    Raises:
        ExecutionError: a copy is not equal to the owner's any more, or has hooks that would never run.
    """
    handles: list[Handle] = []
    exchanges: list[_Exchange] = []
    for number, group in enumerate(routes.tied):
        if not group.value.requires_grad or not group.chained:
            continue
        owner, *holders = group.stages
        tag = _TIED_TAGS + 2 * number
        for holder in holders:
            source, destination = stage_ranks[owner], stage_ranks[holder]
            if source == destination == comm.rank:
                copies = stages[owner].parameter(group), stages[holder].parameter(group)
                _copy_gradient(*copies, group, step)
            elif source == comm.rank:
                exchanges.append(_Exchange(stages[owner].parameter(group), group, step, gives=True))
                handles += exchanges[-1].start(comm, destination, tag)
            elif destination == comm.rank:
                exchanges.append(_Exchange(stages[holder].parameter(group), group, step, gives=False))
                handles += exchanges[-1].start(comm, source, tag)
    wait_all(handles)
    for exchange in exchanges:
        exchange.finish()


def _copy_gradient(owner: nn.Parameter, holder: nn.Parameter, group: Tied, step: int) -> None:
    """Copy between stages of one rank, unless both hold the same object (they don't after a move)."""
    if holder is owner:
        return
    _check_hooks(holder, has_hooks(owner), group)
    if not torch.equal(sample_of(owner, step), sample_of(holder, step).to(owner.device)):
        raise other_values(group)
    holder.grad = None if owner.grad is None else owner.grad.clone()


def _check_hooks(holder: nn.Parameter, owner_has_some: bool, group: Tied) -> None:
    """Refuse hooks that would never run: they run on the owner's copy, where the whole gradient is."""
    if has_hooks(holder) and not owner_has_some:
        raise ExecutionError(
            f"the tied parameter {group.names[0]!r} has hooks in a later stage and none in the first that "
            "holds it, whose hooks are the ones that run: register them on every stage's copy"
        )


_HAS_GRADIENT, _HAS_HOOKS = 1, 2


class _Exchange:
    """What the owner and another holder of a parameter tell each other: whether there are a gradient and
    hooks, and a sample of the values. The owner sends its gradient too, zeros where there is none.

    Args:
        gives: this is the owner.
    """

    def __init__(self, parameter: nn.Parameter, group: Tied, step: int, *, gives: bool) -> None:
        self._parameter = parameter
        self._group = group
        self._gives = gives
        flags = _HAS_GRADIENT * (parameter.grad is not None) + _HAS_HOOKS * has_hooks(parameter)
        own = torch.tensor([flags], device=parameter.device), sample_of(parameter, step)
        self._own = torch.cat(own).to(torch.uint8)
        self._theirs = torch.empty_like(self._own)
        if not gives:
            self._gradient = torch.empty_like(parameter, requires_grad=False)
        elif parameter.grad is not None:
            self._gradient = parameter.grad
        else:
            self._gradient = torch.zeros_like(parameter, requires_grad=False)

    def start(self, comm: Comm, peer: int, tag: int) -> list[Handle]:
        of_gradient = comm.send if self._gives else comm.recv
        return [
            comm.send(self._own, peer, tag),
            comm.recv(self._theirs, peer, tag),
            of_gradient(self._gradient, peer, tag + 1),
        ]

    def finish(self) -> None:
        flags, *sample = self._theirs.tolist()
        if sample != self._own[1:].tolist():
            raise other_values(self._group)
        if not self._gives:
            _check_hooks(self._parameter, bool(flags & _HAS_HOOKS), self._group)
            self._parameter.grad = self._gradient if flags & _HAS_GRADIENT else None
