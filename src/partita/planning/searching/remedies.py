"""The changes with which a plan fits where none does as asked, each found by planning with it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, inf
from typing import Any

from partita.planning.costs.tied_gradients import reduced_tied_gradients
from partita.planning.generators.registry import ScheduleKind, get_schedule, schedule_names
from partita.planning.hardware.cluster import Cluster
from partita.planning.searching.bounds import least_memory_a_rank, least_ranks, too_little_memory
from partita.planning.searching.explore import explore
from partita.planning.searching.trial import Case

__all__ = ["SearchRequest", "larger_cluster", "remedies"]

_MOST_RANKS = 8
"""So many times the ranks, or the least that can hold the parameters, are tried at most."""
_RANKS_TRIED = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Of the numbers of ranks that there can be, from the least on, which are tried."""
_COPIES = (3.0, 2.0, 1.0)
_DIGITS = 3
"""Memory is named with so many digits."""


@dataclass(frozen=True)
class SearchRequest:
    """What was searched for.

    Attributes:
        case: costs, cluster, microbatches and what may be recomputed.
        kinds: the named schedules.
        stages_per_rank: as in `search`.
        with_lists: whether orders of its own could be made.
        larger: as in `search`.
    """

    case: Case
    kinds: Sequence[ScheduleKind]
    stages_per_rank: Sequence[int]
    with_lists: bool
    larger: Callable[[int], Cluster | None]

    @property
    def trains(self) -> bool:
        """Whether every schedule has backward passes."""
        return all(kind.trains for kind in self.kinds)

    def fits(self, **changes: Any) -> bool:
        """Whether there is a plan for the case with these changes."""
        return self.short_by(**changes) <= 0

    def short_by(self, **changes: Any) -> float:
        """By how many bytes the nearest plan is short with these changes; 0 or less where one fits.

        A quick search: what fits, fits in the long one too.
        """
        case = self.case.changed(**changes)
        nearest = inf
        if too_little_memory(case, trains=self.trains) is not None:
            return nearest
        for count in self.stages_per_rank:
            for kinds in self._apart():
                explorer = explore(case, kinds, [count], with_lists=self.with_lists, effort=0.0)
                nearest = min([nearest, *(max(trial.over) for trial in explorer.ranked())])
                if nearest <= 0:
                    return nearest
        return nearest

    def fits_in_a_long_search(self, **changes: Any) -> bool:
        """Whether a search as long as the one that was asked for has a plan with these changes."""
        case = self.case.changed(**changes)
        explorer = explore(case, self.kinds, self.stages_per_rank, with_lists=self.with_lists)
        return any(trial.fits for trial in explorer.ranked())

    def _apart(self) -> list[list[ScheduleKind]]:
        """Schedules to explore, one lot after the other; orders of its own need the least memory."""
        return [[]] if self.with_lists else [[kind] for kind in self.kinds]


def remedies(request: SearchRequest, enough_memory: int | None = None) -> dict[str, Any]:
    """The changes that do, the smallest first, as `InfeasiblePlan.changes` has them.

    Args:
        request: what nothing fits.
        enough_memory: with so many bytes a rank the nearest plan fits, where there is one.
    """
    changes: dict[str, Any] = {}
    memory = _least_memory(request, enough_memory)
    if memory is not None:
        changes["memory_bytes"] = memory
    for other in (_without_more_ranks(request), _more_ranks(request), _fewer_copies(request)):
        change = next(other, None)
        if change is not None:
            return changes | dict([change])
    return changes


def _without_more_ranks(request: SearchRequest) -> Iterator[tuple[str, Any]]:
    case = request.case
    if not case.recompute and request.fits(recompute=True):
        yield "recompute", True
    is_tied = any(tied.gradient_bytes for tied in case.costs.tied)
    if is_tied and request.fits(costs=reduced_tied_gradients(case.costs)):
        yield "tied_gradients", "reduced"
    every = [get_schedule(name) for name in schedule_names() if get_schedule(name).trains]
    anything = replace(request, kinds=every, with_lists=True)
    # Nothing takes less memory than one microbatch after the other.
    if request.trains and not anything.fits(microbatches=1):
        return
    if (len(request.kinds) < len(every) or not request.with_lists) and anything.fits():
        yield "schedules", None
    microbatches = case.microbatches // 2
    while microbatches:
        if request.fits(microbatches=microbatches):
            yield "microbatches", microbatches
        microbatches //= 2


def _more_ranks(request: SearchRequest) -> Iterator[tuple[str, Any]]:
    least = least_ranks(request.case, trains=request.trains)
    if least is None:
        return
    least = max(least, request.case.cluster.ranks + 1)
    stages = len(request.case.costs.allowed_borders) + 1
    most = min(stages // min(request.stages_per_rank, default=1), _MOST_RANKS * least)
    possible = (cluster for ranks in range(least, most + 1) if (cluster := request.larger(ranks)))
    for number, cluster in enumerate(islice(possible, _RANKS_TRIED[-1] + 1)):
        if number in _RANKS_TRIED and request.fits(cluster=cluster):
            yield "ranks", cluster.ranks


def _fewer_copies(request: SearchRequest) -> Iterator[tuple[str, Any]]:
    for copies in _COPIES:
        if copies < request.case.parameter_copies and request.fits(parameter_copies=copies):
            yield "parameter_copies", copies


def _least_memory(request: SearchRequest, enough: int | None) -> int | None:
    """The least bytes a rank that were found to do, rounded up to a few digits."""
    case = request.case
    bound = least_memory_a_rank(case, trains=request.trains)
    limits = [limit for rank in range(case.cluster.ranks) if (limit := case.cluster.memory(rank)) is not None]
    if not limits:
        return None
    too_little = max(min(limits), bound - 1)
    first = max(enough or bound, too_little + 1)
    grain = 10 ** max(len(str(first)) - _DIGITS, 0)
    low, high = too_little // grain, ceil(first / grain)
    short_by = _short_by_in(request, high * grain)
    if 0 < short_by < inf and enough and request.fits_in_a_long_search(cluster=_of(request, high * grain)):
        return high * grain
    while short_by > 0:
        if short_by == inf:
            return None
        low, high = high, high + max(ceil(short_by / grain), high - low)
        short_by = _short_by_in(request, high * grain)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _short_by_in(request, middle * grain) <= 0 else (middle, high)
    return high * grain


def _short_by_in(request: SearchRequest, size: int) -> float:
    return request.short_by(cluster=_of(request, size))


def _of(request: SearchRequest, size: int) -> Cluster:
    """The cluster with so many bytes a rank."""
    return replace(request.case.cluster, memory_bytes=size, memories=None)


def larger_cluster(cluster: Cluster, ranks: int) -> Cluster | None:
    """So many ranks like those that there are, joined alike; None where a node would not be full."""
    levels = cluster.levels
    if levels and (levels[-1].ranks or 0) == cluster.ranks:
        levels = (*levels[:-1], replace(levels[-1], ranks=None))
    if any(level.ranks and level.ranks < ranks and ranks % level.ranks for level in levels):
        return None
    more = [rank % cluster.ranks for rank in range(ranks)]
    speeds = None if cluster.speeds is None else tuple(cluster.speed(rank) for rank in more)
    memories = None if cluster.memories is None else tuple(cluster.memory(rank) for rank in more)
    return replace(cluster, ranks=ranks, speeds=speeds, memories=memories, levels=levels)
