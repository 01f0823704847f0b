"""GPipe: all forward passes, then all backward passes."""

from __future__ import annotations

from collections.abc import Sequence

from partita.planning.generators.making.arguments import place
from partita.planning.generators.making.ticks import forwards, laid_out
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.schedule import Schedule

__all__ = ["gpipe"]


def gpipe(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Each stage runs all of its forward passes, then all of its backward passes.

    The backward passes keep the order of the microbatches, so that gradients add up in the order in which the
    uncut model would add them. Memory grows with the number of microbatches::

        rank 0   0F0 0F1 0F2  .   .  0B0 0B1 0B2
        rank 1    .  1F0 1F1 1F2 1B0 1B1 1B2

    (Y. Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", 2018.)

    Args:
        stages: how many stages there are.
        microbatches: how many a step has; may be fewer than the stages.
        ranks: the stages go round so many ranks; one rank a stage where it is not given.
        placement: the rank of each stage, in place of `ranks`.

    Raises:
        ScheduleError: a number below 1, or a rank without a stage.
    """
    stage_ranks = place("GPipe", stages, microbatches, ranks, placement)
    queues: list[list[list[Action]]] = [[] for _ in range(max(stage_ranks) + 1)]
    for stage, rank in enumerate(stage_ranks):
        backwards = [Action(stage, ActionKind.B, microbatch) for microbatch in range(microbatches)]
        queues[rank].append(forwards(stage, microbatches) + backwards)
    return Schedule("GPipe", stage_ranks, microbatches, laid_out(queues, stages, "GPipe"))
