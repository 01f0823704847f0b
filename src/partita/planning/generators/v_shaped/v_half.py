"""V-Half: a V of stages, two a rank, in half of 1F1B's memory.

With 4 ranks and 4 microbatches (capitals: the stage on the way down; small letters: the one on the way up)::

    0   F0 F1 F2 F3  .  .  . f0 i0 w0 f1 i1 w1 f2  .  . I0 i2 W0 f3 i3 I1 w2 w3 W1 I2 W2 I3 W3
    1    . F0 F1 F2 F3  . f0  . f1 i0 w0 f2 i1 w1  . I0 W0  . f3 i2 I1 i3 w2 w3 I2 W1 I3 W2 W3
    2    .  . F0 F1 F2 f0  . f1  . f2 i0 w0 F3 i1 I0 W0  . f3 w1 I1 i2 w2 i3 I2 w3 I3 W1 W2 W3
    3    .  .  . F0 f0 F1 f1 F2 f2  .  . i0 w0 I0 W0 F3 f3 i1 I1 w1 W1 i2 I2 i3 I3 w2 w3 W2 W3

(P. Qi et al., "Pipeline parallelism with controllable memory", 2024, section 4.)
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.planning.generators.making.arguments import place_in_v
from partita.planning.generators.making.v_block import BlockTicks, v_rows
from partita.planning.schedules.schedule import Schedule

__all__ = ["v_half"]


def v_half(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Of p ranks, each holds at most ``(p + 2) // 2`` microbatches of a stage of 1F1B: twice as many of its
    halves.

    A microbatch goes down the ranks in two ticks each, up in one, its gradient down in two and up in one. So
    every rank holds it for ``6 (p - 1)`` ticks, its two stages together, and another one starts every 6. With
    F = I = W a rank idles for ``3 p - 7`` of them (``3 p - 4`` where p is odd).

    Args:
        stages: how many stages there are: two a rank.
        microbatches: how many a step has.
        ranks: how many ranks there are; half the stages where it is not given.
        placement: the rank of each stage; only this V will do.

    Raises:
        ScheduleError: not two stages a rank, another placement, or a number below 1.
    """
    stage_ranks = place_in_v("VHalf", stages, microbatches, ranks, placement)
    p = stages // 2
    # No two passes of a rank may fall on the same tick, so with an even number of ranks I starts later.
    pause = 3 if p % 2 == 0 else 0
    block = [
        BlockTicks(
            near_forward=2 * rank,
            far_forward=2 * (p - 1) + 1 + (p - 1 - rank),
            far_input=3 * p - 1 + pause + 2 * rank,
            near_input=5 * p - 1 + pause + (p - 1 - rank),
        )
        for rank in range(p)
    ]
    return Schedule("VHalf", stage_ranks, microbatches, v_rows(block, microbatches, most=2 * ((p + 2) // 2)))
