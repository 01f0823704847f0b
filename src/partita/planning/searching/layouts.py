"""Which placements of stages a search tries: shapes, and on unequal ranks which rank takes which place."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import factorial

from partita.planning.cutting._cuts import CutProblem, Cuts
from partita.planning.hardware.cluster import Cluster
from partita.planning.hardware.placement import loop_placement, v_placement

__all__ = ["Layout", "layouts", "rearranged", "swapped"]

_MOST_ORDERS = 24
_MOST_STAGES = 4
"""So many a rank, where stages are placed freely."""


@dataclass(frozen=True)
class Layout:
    """How stages are placed.

    Attributes:
        shape: "loop", round the ranks; "V", down and back up; "free", any other way.
        own: the placement of equal ranks, as a schedule of that shape has it.
        ranks: the rank that takes the place of each rank in `own`.
    """

    shape: str
    own: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(self.ranks[place] for place in self.own)

    @cached_property
    def has_shared_ranks(self) -> bool:
        """Whether several stages lie on a rank."""
        return len(set(self.own)) < len(self.own)


def layouts(cluster: Cluster, stages_per_rank: Sequence[int], most_stages: int) -> Iterator[Layout]:
    """All that are worth a try, of at most so many stages; equal ranks stay in their order."""
    for count in dict.fromkeys(stages_per_rank):
        stages = count * cluster.ranks
        if stages > most_stages:
            continue
        for order in _orders(cluster):
            yield Layout("loop", loop_placement(stages, cluster.ranks), order)
            if count == 2:
                yield Layout("V", v_placement(stages, cluster.ranks), order)


def swapped(layout: Layout, cluster: Cluster) -> Iterator[Layout]:
    """The same with two unequal ranks in each other's place."""
    ranks = layout.ranks
    for one in range(len(ranks)):
        for other in range(one + 1, len(ranks)):
            if _kind(cluster, ranks[one]) != _kind(cluster, ranks[other]):
                changed = list(ranks)
                changed[one], changed[other] = changed[other], changed[one]
                yield Layout(layout.shape, layout.own, tuple(changed))


def rearranged(layout: Layout, cuts: Cuts, problem: CutProblem) -> Iterator[tuple[Layout, Cuts]]:
    """Any other placement that is one step away: a stage on another rank, two in each other's place, two
    neighbours made one, or one made two. Every rank keeps a stage.
    """
    ranks, stages = layout.stage_ranks, range(len(layout.own))
    count = len(layout.ranks)
    for stage in stages:
        for rank in range(count):
            changed = (*ranks[:stage], rank, *ranks[stage + 1 :])
            if rank != ranks[stage] and len(set(changed)) == count:
                yield _free(changed), cuts
        for other in range(stage + 1, len(ranks)):
            if ranks[stage] != ranks[other]:
                exchanged = list(ranks)
                exchanged[stage], exchanged[other] = ranks[other], ranks[stage]
                yield _free(tuple(exchanged)), cuts
    for stage in stages:
        without = (*ranks[:stage], *ranks[stage + 1 :])
        if len(set(without)) == count:
            for place in {stage, stage + 1} - {0, len(ranks)}:
                yield _free(without), (*cuts[:place], *cuts[place + 1 :])
        first = bisect_right(problem.places, cuts[stage])
        inside = problem.places[first : bisect_left(problem.places, cuts[stage + 1])]
        if inside and len(ranks) < _MOST_STAGES * count:
            middle = inside[len(inside) // 2]
            halved = (*cuts[: stage + 1], middle, *cuts[stage + 1 :])
            for rank in range(count):
                if rank != ranks[stage]:
                    yield _free((*ranks[:stage], rank, *ranks[stage:])), halved
                    yield _free((*ranks[: stage + 1], rank, *ranks[stage + 1 :])), halved


def _free(stage_ranks: tuple[int, ...]) -> Layout:
    return Layout("free", stage_ranks, tuple(range(max(stage_ranks) + 1)))


def _kind(cluster: Cluster, rank: int) -> Hashable:
    return cluster.speed(rank), cluster.memory(rank)


def _orders(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """As numbered; all that differ where they are few; else by speed: up, down, fast ones in the middle."""
    ranks = tuple(range(cluster.ranks))
    kinds = [_kind(cluster, rank) for rank in ranks]
    yield ranks
    if len(set(kinds)) == 1:
        return
    seen = {tuple(kinds)}
    if factorial(cluster.ranks) <= _MOST_ORDERS:
        candidates: Sequence[tuple[int, ...]] = list(permutations(ranks))
    else:
        up = sorted(ranks, key=lambda rank: (cluster.speed(rank), cluster.memory(rank) or 0))
        candidates = [tuple(up), tuple(reversed(up)), (*up[::2], *reversed(up[1::2]))]
    for order in candidates:
        mark = tuple(kinds[rank] for rank in order)
        if mark not in seen:
            seen.add(mark)
            yield order
