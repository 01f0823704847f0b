"""Whether ranks clip gradients by norms of their own: the uncut model has one norm, of all gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from partita.errors import ExecutionError
from partita.pipelining.stages.optimizer_steps import before_optimizers_step, steps_any_of
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.preparing.arguments import StepArguments
from partita.pipelining.steps.preparing.preparation import Accepted, PreparedStep, StepPreparation
from partita.runtime import Comm

__all__ = ["ClippedApart"]

_STEPS = 8
"""After so many steps of training nothing is compared any more: clipping begins with large gradients."""
_CLOSE = 1e-5
"""How far the norm of clipped gradients may be from the limit, for rounding."""
_BELOW = 1e-6
"""How much smaller it may be besides: torch adds so much to the norm that it divides by."""
_LEAST = 1e-3
"""The smallest limit that is looked for."""


class ClippedApart:
    """A `StepPreparation` that also compares, in the first steps of training, the norms that the ranks' own
    gradients had when an optimizer stepped them. Where two ranks clip theirs to a limit, both have that norm,
    a number of few digits; gradients that are clipped together, or not at all, hardly ever have. But for one
    that both have, of a tied parameter: where the others are small beside it, it gives both its norm.

    Args:
        preparation: what else prepares a step.
        comm: of the ranks.
        stages: of this rank.
    """

    def __init__(self, preparation: StepPreparation, comm: Comm, stages: Sequence[Stage]) -> None:
        self._preparation = preparation
        self._comm = comm
        self._stages = stages
        self._left = _STEPS if comm.size > 1 else 0
        self._is_training = False
        self._norms: tuple[float, ...] = ()
        before_optimizers_step(self, ClippedApart._before_step)

    def accept(self, arguments: StepArguments) -> Accepted:
        """See `StepPreparation`."""
        self._is_training = arguments.train
        return self._preparation.accept(arguments)

    def prepare(self, accepted: Accepted) -> PreparedStep:
        """See `StepPreparation`.

        Raises:
            ExecutionError: two ranks clipped their own gradients; on every rank.
        """
        if self._left and self._is_training:
            if self._left < _STEPS:  # there has been a step
                norms, self._norms = self._norms, ()
                _compare([norms for (norms,) in self._comm.all_gather_object((norms,))])
            self._left -= 1
        return self._preparation.prepare(accepted)

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._left and not self._norms and steps_any_of(optimizer, self._stages):
            own = dict.fromkeys(it for stage in self._stages for it in stage.module.parameters())
            self._norms = _norms([parameter.grad for parameter in own if parameter.grad is not None])


def _norms(gradients: Sequence[Tensor]) -> tuple[float, ...]:
    """The norm of each; none where some are no ordinary tensors, and where each has a norm of few digits by
    itself: what gives it one (clipping of each alone, signs) is the same in the uncut model.
    """
    if any(isinstance(it, DTensor) or it.layout is not torch.strided for it in gradients):
        return ()
    norms = [torch.linalg.vector_norm(it.detach()).to("cpu", torch.float64).item() for it in gradients]
    return () if all(_is_near(norm, _limit(norm)) for norm in norms) else tuple(norms)


def _limit(norm: float) -> float:
    """The number of few digits that is nearest; of one digit, where a norm may miss it by more."""
    return float(f"{norm:.3g}" if norm > 0.1 else f"{norm:.1g}")


def _is_near(norm: float, limit: float) -> bool:
    return -_CLOSE * limit - _BELOW <= norm - limit <= _CLOSE * limit


def _compare(gathered: Sequence[tuple[float, ...]]) -> None:
    of_ranks = {rank: math.hypot(*norms) for rank, norms in enumerate(gathered)}
    of_ranks = {rank: norm for rank, norm in of_ranks.items() if _LEAST / 2 < norm < math.inf}
    for (rank, norm), (other, others) in combinations(of_ranks.items(), 2):
        limit = _limit(norm)
        of_both = math.hypot(*set(gathered[rank]).intersection(gathered[other]))
        if _is_near(norm, limit) and _is_near(others, limit) and not _is_near(of_both, limit):
            raise ExecutionError(
                f"the gradients of ranks {rank} and {other} both had the norm {limit:g} when they were "
                "stepped: each rank has clipped its own (torch.nn.utils.clip_grad_norm_), where the uncut "
                "model has one norm of all. Call partita.pipelining.clip_grad_norm_(schedule, "
                f"{limit:g}) instead, on every rank, and start again"
            )
