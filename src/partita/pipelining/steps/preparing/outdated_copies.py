"""The warning that another rank runs with weights that this one has stepped.

Two pipelines over the same modules (a discriminator by itself, and behind its generator) may have a parameter
on different ranks. In each process it is another tensor, and an optimizer changes that of its own process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from partita.listing import listed
from partita.pipelining.stages.optimizer_steps import before_optimizers_step, stepped_by
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.preparing.arguments import StepArguments
from partita.pipelining.steps.preparing.preparation import Accepted, PreparedStep, StepPreparation
from partita.runtime import Comm, InProcessComm

__all__ = ["OutdatedCopies"]


class OutdatedCopies:
    """A `StepPreparation` that, as long as it lives, also sees which parameters of other ranks' stages an
    optimizer of this process steps, and warns of them once.

    Args:
        preparation: what else prepares a step.
        comm: of the ranks; those of an `InProcessWorld` have one process, and are not watched.
        stages: of this rank.
        stage_ranks: the rank of each stage.
    """

    def __init__(
        self, preparation: StepPreparation, comm: Comm, stages: Iterable[Stage], stage_ranks: tuple[int, ...]
    ) -> None:
        self._preparation = preparation
        own_stages = list(stages)
        own = {parameter for stage in own_stages for parameter in stage.module.parameters()}
        self._elsewhere: dict[int, tuple[ref[nn.Parameter], str, int]] = {}
        if not isinstance(comm, InProcessComm):
            self._elsewhere = {
                id(parameter): (ref(parameter), name, stage_ranks[index])
                for index, name, parameter in own_stages[0].other_weights
                if parameter not in own
            }
        self._stepped: dict[str, int] = {}
        self._warned = False
        if self._elsewhere:
            before_optimizers_step(self, OutdatedCopies._before_step)

    def accept(self, arguments: StepArguments) -> Accepted:
        """See `StepPreparation`."""
        self._warn()
        return self._preparation.accept(arguments)

    def prepare(self, accepted: Accepted) -> PreparedStep:
        """See `StepPreparation`."""
        return self._preparation.prepare(accepted)

    def _before_step(self, optimizer: Optimizer) -> None:
        for parameter in stepped_by(optimizer):
            if parameter.grad is not None and id(parameter) in self._elsewhere:
                reference, name, rank = self._elsewhere[id(parameter)]
                if reference() is parameter:
                    self._stepped[name] = rank

    def _warn(self) -> None:
        if not self._stepped or self._warned:
            return
        self._warned = True
        ranks = sorted(set(self._stepped.values()))
        warnings.warn(
            f"an optimizer of this rank has stepped {listed(self._stepped)}, and this pipeline "
            f"runs that on rank {' and '.join(map(str, ranks))}, which has values of its own: another "
            "pipeline over the same modules has it here. Cut both so that each parameter is on one rank in "
            "either, or give the new values to the other rank after each step (torch.distributed.broadcast)",
            UserWarning,
            stacklevel=6,
        )
