"""Cuts whose stages fit into the memory of their ranks, where several of them share one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from partita.planning.costs.stage_cost import StageCost
from partita.planning.cutting._cuts import CutProblem, Cuts, find_cuts
from partita.planning.schedules.actions import ActionKind
from partita.planning.schedules.schedule import Schedule
from partita.planning.simulating.simulate import peak_bytes

__all__ = ["find_cuts_within"]


def find_cuts_within(problem: CutProblem, schedule: Schedule, limit: int) -> Cuts | None:
    """The best cuts that were found in which no rank of `schedule` holds more than `limit` bytes.

    With one stage a rank they are the best that there are.
    """
    if len(set(schedule.stage_ranks)) == schedule.stages:
        return find_cuts(replace(problem, memory=(limit,) * schedule.stages))
    for attempt in _attempts(problem, schedule, limit):
        cuts = find_cuts(attempt)
        if cuts is not None and max(peak_bytes(schedule, _memory_costs(problem, cuts))) <= limit:
            return cuts
    return None


def _attempts(problem: CutProblem, schedule: Schedule, limit: int) -> Iterator[CutProblem]:
    """The same problem without a limit, then with one that is shared out among the stages of each rank."""
    yield problem
    ranks = schedule.stage_ranks
    counts = _counts_at_the_peak(schedule)
    relaxed = replace(problem, in_flight=counts)
    cuts = find_cuts(problem)
    if cuts is not None:
        sizes = [relaxed.bytes_held(stage, *ends) for stage, ends in enumerate(pairwise(cuts))]
        sums = [sum(size for size, at in zip(sizes, ranks, strict=True) if at == rank) for rank in ranks]
        yield replace(
            relaxed,
            memory=tuple(
                limit * size // total if total else limit for size, total in zip(sizes, sums, strict=True)
            ),
        )
    yield replace(problem, memory=tuple(limit // ranks.count(rank) for rank in ranks))


def _counts_at_the_peak(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, how many microbatches it holds when its rank holds most of all its stages together."""
    own = [
        [stage for stage, at in enumerate(schedule.stage_ranks) if at == rank]
        for rank in range(schedule.ranks)
    ]
    in_flight, counts = [0] * schedule.stages, [0] * schedule.stages
    total, most = [0] * schedule.ranks, [0] * schedule.ranks
    for rank, part in schedule.passes():
        if part.kind is ActionKind.I:
            continue
        change = 1 if part.kind is ActionKind.F else -1
        in_flight[part.stage] += change
        total[rank] += change
        if total[rank] > most[rank]:
            most[rank] = total[rank]
            for stage in own[rank]:
                counts[stage] = in_flight[stage]
    return tuple(counts)


def _memory_costs(problem: CutProblem, cuts: Cuts) -> list[StageCost]:
    return [
        StageCost(
            0.0,
            0.0,
            activation_bytes=problem.activations[end] - problem.activations[start],
            static_bytes=problem.static_bytes(start, end),
        )
        for start, end in pairwise(cuts)
    ]
