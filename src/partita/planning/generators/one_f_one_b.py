"""1F1B: as soon as a microbatch can go back, it does, so that few are in flight."""

from __future__ import annotations

from collections.abc import Sequence

from partita.planning.generators.making.arguments import place
from partita.planning.generators.making.ticks import forwards, laid_out
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.schedule import Schedule

__all__ = ["one_f_one_b"]


def one_f_one_b(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Each stage fills the pipeline behind it, then runs a backward pass per forward pass, then drains.

    A stage holds at most as many microbatches as there are stages from it to the end. The bubble is GPipe's::

        rank 0   0F0 0F1  .  0B0 0F2 0B1  .  0B2
        rank 1    .  1F0 1B0 1F1 1B1 1F2 1B2

    Where a rank has several stages, each stage keeps this order of its own, and the rank takes whichever can
    run.

    (D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019; the variant
    with a flush at the end of the step: "Memory-efficient pipeline-parallel DNN training", 2020.)

    Args and errors are those of `gpipe`.
    """
    stage_ranks = place("1F1B", stages, microbatches, ranks, placement)
    queues: list[list[list[Action]]] = [[] for _ in range(max(stage_ranks) + 1)]
    for stage, rank in enumerate(stage_ranks):
        queues[rank].append(_order(stage, stages, microbatches))
    return Schedule("1F1B", stage_ranks, microbatches, laid_out(queues, stages, "1F1B"))


def _order(stage: int, stages: int, microbatches: int) -> list[Action]:
    forward = forwards(stage, microbatches)
    ahead = min(microbatches, stages - stage)
    order = forward[:ahead]
    for microbatch in range(microbatches):
        order.append(Action(stage, ActionKind.B, microbatch))
        order += forward[ahead + microbatch : ahead + microbatch + 1]
    return order
