"""When gradients of tied parameters are summed that do not travel with each microbatch.

Each rank begins when it has done all else, and sums with the others that hold the parameter::

    rank 0   ... 0B1 .. .. [0]      a parameter of stages 0 and 3
    rank 1   ... 1B1 ..
    rank 2   ... 2B1
    rank 3   ... 3B1 .. .. [0]      waits for rank 0 from here on
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from partita.errors import ScheduleError
from partita.planning.hardware.cluster import Cluster

__all__ = ["GradientSum", "gradient_sums"]


class GradientSum(NamedTuple):
    """One sum over several ranks.

    Attributes:
        stage: the first that holds the parameter.
        ranks: those that hold it.
        start_s: when all of them have come to it.
        end_s: when they have the sum.
    """

    stage: int
    ranks: tuple[int, ...]
    start_s: float
    end_s: float


def gradient_sums(
    summed: Iterable[Sequence[tuple[int, Sequence[int]]]],
    stage_ranks: Sequence[int],
    cluster: Cluster,
    ends: Sequence[Sequence[float]],
) -> tuple[GradientSum, ...]:
    """Every sum after a step, in order; a rank does one at a time.

    Args:
        summed: `StageCost.summed_gradients` of each stage.
        stage_ranks: the rank of each stage.
        cluster: the links.
        ends: for each rank, when what it does in the step ends.

    Raises:
        ScheduleError: a sum with a stage that there is not, or that is no later one.

    >>> gradient_sums([((8, (1,)),), ()], (0, 1), Cluster(2, bandwidth_bytes_per_s=4.0), [[9.0], [6.0]])
    (GradientSum(stage=0, ranks=(0, 1), start_s=9.0, end_s=11.0),)
    """
    free_s = [max(of_rank, default=0.0) for of_rank in ends]
    sums = []
    for stage, own in enumerate(summed):
        for size, others in own:
            if not all(stage < other < len(stage_ranks) for other in others):
                raise ScheduleError(
                    f"summed_gradients of stage {stage} names the stages {others}: give later ones, and "
                    f"stages are 0 to {len(stage_ranks) - 1}"
                )
            ranks = tuple(sorted({stage_ranks[one] for one in (stage, *others)}))
            if len(ranks) == 1:
                continue
            start_s = max(free_s[rank] for rank in ranks)
            end_s = start_s + cluster.all_reduce_s(size, ranks)
            for rank in ranks:
                free_s[rank] = end_s
            sums.append(GradientSum(stage, ranks, start_s, end_s))
    return tuple(sums)
