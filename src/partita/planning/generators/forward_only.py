"""Forward passes alone: inference and evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from partita.planning.generators.making.arguments import place
from partita.planning.generators.making.ticks import forwards, laid_out
from partita.planning.schedules.actions import Action
from partita.planning.schedules.schedule import Schedule

__all__ = ["forward_only"]


def forward_only(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Each stage runs its forward passes in order; nothing is kept for a backward pass.

    Args and errors are those of `gpipe`.
    """
    stage_ranks = place("ForwardOnly", stages, microbatches, ranks, placement)
    queues: list[list[list[Action]]] = [[] for _ in range(max(stage_ranks) + 1)]
    for stage, rank in enumerate(stage_ranks):
        queues[rank].append(forwards(stage, microbatches))
    return Schedule("ForwardOnly", stage_ranks, microbatches, laid_out(queues, stages, "ForwardOnly"))
