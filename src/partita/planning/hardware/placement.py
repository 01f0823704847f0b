"""Which rank runs which stage."""

from __future__ import annotations

from collections.abc import Sequence

from partita.errors import ScheduleError
from partita.planning._check import require_count

__all__ = ["loop_placement", "v_placement"]


def loop_placement(stages: int, ranks: int) -> tuple[int, ...]:
    """The rank of each stage where the stages go round the ranks, as often as it takes.

    (D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    2021, section 2.2.)

    >>> loop_placement(stages=5, ranks=2)
    (0, 1, 0, 1, 0)
    """
    require_count(stages, "stages")
    require_count(ranks, "ranks")
    return tuple(stage % ranks for stage in range(stages))


def v_placement(stages: int, ranks: int) -> tuple[int, ...]:
    """The rank of each stage where the stages go down the ranks and come back, two a rank: a V.

    The first rank then holds the first and the last stage. (P. Qi et al., "Pipeline parallelism with
    controllable memory", 2024.)

    >>> v_placement(stages=6, ranks=3)
    (0, 1, 2, 2, 1, 0)
    """
    require_count(ranks, "ranks")
    if stages != 2 * ranks:
        raise ScheduleError(
            f"{stages} stages on {ranks} ranks: a V needs two stages a rank, so give {2 * ranks} stages"
        )
    return (*range(ranks), *reversed(range(ranks)))


def check_placement(stages: int, placement: Sequence[int]) -> tuple[int, ...]:
    """`placement` as a tuple, once it is sure that it names one rank a stage and leaves no rank out."""
    if len(placement) != stages:
        raise ScheduleError(
            f"the placement names {len(placement)} ranks for {stages} stages: give one a stage"
        )
    if set(placement) != set(range(max(placement) + 1)):
        raise ScheduleError(
            f"the placement {tuple(placement)} leaves a rank without a stage: number the ranks from 0"
        )
    return tuple(placement)
