"""The weights that a loss is computed from besides the output: they must be of this rank's stages."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from partita._torch.autograd.running_pass import leaves_behind
from partita.errors import ExecutionError
from partita.pipelining.stages.stage import Stage

__all__ = ["LossLeaves"]


class LossLeaves:
    """Looks at the first loss of a program. A penalty on all weights of the uncut model, or a head that is
    tied to the embedding, would train the last stage's weights, and leave the gradients of all others on a
    rank where no optimizer sees them.

    Args:
        stages: those of this rank.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = tuple(stages)
        self._is_over = False

    def check(self, loss: Tensor) -> None:
        """Look at it, if it is the first one.

        Raises:
            ExecutionError: it depends on a weight of a stage of another rank; names it.
        """
        if self._is_over:
            return
        self._is_over = True
        own = {id(weight) for stage in self._stages for weight in stage.module.parameters()}
        elsewhere = {
            id(weight): (name, index)
            for stage in self._stages
            for index, name, weight in stage.other_weights
            if id(weight) not in own
        }
        for leaf in leaves_behind([loss]) if elsewhere else ():
            if id(leaf) in elsewhere:
                name, index = elsewhere[id(leaf)]
                raise ExecutionError(
                    f"loss_fn uses {name!r}, which stage {index} trains on another rank: its gradient would "
                    "stay on this one, where nothing reads it. For a penalty, let each rank add that of its "
                    "own stage between schedule.step() and optimizer.step(): "
                    "penalty(stage.module.parameters()).backward(); what else uses a weight belongs into the "
                    "model's forward"
                )
