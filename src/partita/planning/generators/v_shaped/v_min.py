"""V-Min: a V of stages, two a rank, in a third of 1F1B's memory.

With 4 ranks and 3 microbatches (capitals: the stage on the way down; small letters: the one on the way up)::

    0   F0 F1 F2  .  .  .  . f0 i0 w0 f1 i1  .  .  . I0 w1 W0  . f2 i2 I1 w2 W1  .  .  . I2 W2
    1    . F0 F1  .  .  . f0  . f1 i0 w0 F2  .  . I0 i1 W0 w1 f2  . I1 i2 w2 W1  .  . I2 W2
    2    .  . F0 F1  . f0  . f1  .  . i0 w0 F2 I0 W0  . i1 f2 w1 I1 W1  . i2 w2  . I2 W2
    3    .  .  . F0 f0 F1 f1  .  .  .  . i0 I0 w0 W0 F2 f2 i1 I1 w1 W1  .  . i2 I2 w2 W2

(P. Qi et al., "Pipeline parallelism with controllable memory", 2024, section 4.)
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.planning.generators.making.arguments import place_in_v
from partita.planning.generators.making.v_block import BlockTicks, v_rows
from partita.planning.schedules.schedule import Schedule

__all__ = ["v_min"]


def v_min(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Of p ranks, each holds at most ``(p + 4) // 3`` microbatches of a stage of 1F1B: twice as many of its
    halves.

    A microbatch and its gradient take one tick a rank on each way, which is the least that can be, so every
    rank holds it for ``4 (p - 1)`` ticks, its two stages together. With F = I = W a rank idles for ``4 p -
    5`` of them (``4 p - 7`` where p can be divided by 3); where the three differ, more, since nothing has
    time to spare.

    Args and errors are those of `v_half`.
    """
    stage_ranks = place_in_v("VMin", stages, microbatches, ranks, placement)
    p = stages // 2
    # No two passes of a rank may fall on the same tick, so where 3 divides p, I starts later.
    pause = 2 if p % 3 == 0 else 0
    block = [
        BlockTicks(
            near_forward=rank,
            far_forward=p + (p - 1 - rank),
            far_input=2 * p + pause + rank,
            near_input=3 * p + pause + (p - 1 - rank),
        )
        for rank in range(p)
    ]
    return Schedule("VMin", stage_ranks, microbatches, v_rows(block, microbatches, most=2 * ((p + 4) // 3)))
