"""ZB-H2: no bubble between a rank's first and last pass, for twice the memory of 1F1B.

With 4 ranks and 8 microbatches::

    0   F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7
    1    . F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7
    2    .  . F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7
    3    .  .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7

(P. Qi et al., "Zero bubble pipeline parallelism", 2023, section 2.2.)
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.planning.generators.zb_h1 import make_zero_bubble
from partita.planning.schedules.schedule import Schedule

__all__ = ["zb_h2"]


def zb_h2(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Stage s of p runs ahead by ``2 (p - 1 - s)`` microbatches, and its W is ``2 s`` microbatches late.

    With F = I = W and at least ``2 p - 1`` microbatches no rank idles between its first and its last pass;
    but the ranks start one after the other and end so, and the step is as long as with ZB-H1 unless the
    optimizer's step of each rank follows at once. A stage holds up to ``2 p - 1`` microbatches.

    Args and errors are those of `zb_h1`.
    """
    return make_zero_bubble("ZBH2", 2, stages, microbatches, ranks, placement)
