"""What a schedule does for tied parameters: around each step, and between two."""

from __future__ import annotations

from collections.abc import Mapping

from partita.pipelining.interface.routes import Routes
from partita.pipelining.stages.stage import Stage
from partita.pipelining.tied.stepped_once import SteppedOnce
from partita.pipelining.tied.tied import share_gradients
from partita.pipelining.tied.tied_sum import TiedSums
from partita.runtime import Comm

__all__ = ["TiedParameters"]


class TiedParameters:
    """This rank's part. As long as it lives, no optimizer takes one gradient twice (`SteppedOnce`).

    Args:
        stages: those of this rank, by index.
        stage_ranks: the rank of each stage.
    """

    def __init__(self, comm: Comm, stages: Mapping[int, Stage], stage_ranks: tuple[int, ...]) -> None:
        self._comm = comm
        self._stages = stages
        self._stage_ranks = stage_ranks
        self._stepped_once = SteppedOnce(stages.values())
        self._sums = TiedSums(comm, stages, stage_ranks)

    def begin(self, routes: Routes) -> None:
        """Before a step that trains.

        Raises:
            ExecutionError: hooks, or a sharded parameter, that the way its gradient takes does not serve.
        """
        self._sums = TiedSums(self._comm, self._stages, self._stage_ranks)
        self._sums.begin(routes.tied)

    def end(self, routes: Routes) -> None:
        """After it: every holder has the whole gradient. Collective."""
        self._sums.end()
        share_gradients(self._comm, self._stages, self._stage_ranks, routes)
