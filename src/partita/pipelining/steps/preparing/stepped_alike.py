"""Whether an optimizer steps the weights of all ranks after a step of the schedule, or of some alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch.optim import Optimizer

from partita.pipelining.stages.stage import Stage
from partita.pipelining.tied.stepped_once import before_optimizers_step

__all__ = ["SteppedAlike"]

_UNKNOWN = -1
_HABIT = 2
"""So many times in a row both ranks have been stepped: then it is no plan that one of them is not."""


class SteppedAlike:
    """Counts the training steps after which an optimizer has stepped the weights of this rank, and compares
    the count with those of other ranks. A rank that leaves its optimizer out where its own loss, or a
    ``torch.amp.GradScaler`` of its own, is not finite, falls a step behind the others.

    Args:
        stages: of this rank.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = list(stages)
        self._count = 0
        self._is_stepped = False
        self._before: dict[int, tuple[int, int]] = {}
        self._alike: dict[int, int] = {}
        before_optimizers_step(self, SteppedAlike._before_step)

    def count(self) -> int:
        """After how many training steps so far, asked for at the beginning of each; -1 where nothing is
        trained.
        """
        if not any(weight.requires_grad for stage in self._stages for weight in stage.module.parameters()):
            return _UNKNOWN
        self._count += self._is_stepped
        self._is_stepped = False
        return self._count

    def compare(self, rank: int, peer: int, mine: int, theirs: int) -> None:
        """Compare the count of ``rank``, which is this one, with that of another.

        Warns:
            UserWarning: one of the two was stepped since the last comparison, which has not been so before.
        """
        if _UNKNOWN in (mine, theirs):
            return
        before = self._before.get(peer, (0, 0))
        self._before[peer] = mine, theirs
        stepped, other = mine > before[0], theirs > before[1]
        if stepped == other:
            self._alike[peer] = self._alike.get(peer, 0) + stepped
            return
        if self._alike.pop(peer, 0) >= _HABIT:
            yes, no = (rank, peer) if stepped else (peer, rank)
            warnings.warn(
                f"an optimizer has stepped the weights of rank {yes} since the last step, and none those of "
                f"rank {no}, for the first time: the model's stages are of different steps now. Where a step "
                "is left out (a loss or a gradient that is not finite), decide so on all ranks alike: "
                "partita.pipelining.GradScaler does, and clip_grad_norm_ returns the same norm everywhere",
                UserWarning,
                stacklevel=6,
            )

    def _before_step(self, optimizer: Optimizer) -> None:
        if not self._is_stepped:
            own = {id(weight) for stage in self._stages for weight in stage.module.parameters()}
            self._is_stepped = any(
                id(it) in own for group in optimizer.param_groups for it in group["params"]
            )
