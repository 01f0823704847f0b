"""Looped breadth-first: GPipe for ranks that have several stages each."""

from __future__ import annotations

from collections.abc import Sequence

from partita.planning.generators.making.arguments import place
from partita.planning.generators.making.ticks import forwards, laid_out
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.schedule import Schedule

__all__ = ["looped_bfs"]


def looped_bfs(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Each rank runs all microbatches through its first stage, then its next; backward from the last.

    A stage's parameters are thus needed for one stretch forward and one stretch backward, which suits sharded
    ones. The bubble is that of GPipe divided by the number of stages a rank.

    (J. Lamy-Poirier, "Breadth-first pipeline parallelism", 2022.)

    Args and errors are those of `gpipe`.
    """
    stage_ranks = place("LoopedBFS", stages, microbatches, ranks, placement)
    queues = []
    for rank in range(max(stage_ranks) + 1):
        own = [stage for stage in range(stages) if stage_ranks[stage] == rank]
        order = [action for stage in own for action in forwards(stage, microbatches)]
        order += [
            Action(stage, ActionKind.B, number) for stage in reversed(own) for number in range(microbatches)
        ]
        queues.append([order])
    return Schedule("LoopedBFS", stage_ranks, microbatches, laid_out(queues, stages, "LoopedBFS"))
