"""Cuts that give each rank work in proportion to its speed, whichever stages it has.

Where each rank has one stage and all are equally fast, `find_cuts` knows the best ones. Here ranks have
several stages, or speeds of their own: from cuts at the nearest places to each stage's share, borders move
for as long as that makes the busiest rank less busy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations
from math import comb

from partita.planning.costs.units import Unit
from partita.planning.cutting._cuts import CutProblem, Cuts

__all__ = ["RULES", "all_cuts", "balanced_cuts", "cut_moves", "fewer_places", "rank_work", "weighed"]

_STEPS = (1, 2, 4, 8)
_RUNS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""So many neighbouring borders move together: what one stage has too much of goes to one further away."""
_MOST_BORDERS = 64
"""Where there are more, such moves would take too long."""
_MOST_ROUNDS = 40

RULES = ("layers", "parameters", "times")
"""What rules of thumb make equal in all stages."""


def rank_work(
    problem: CutProblem, cuts: Cuts, stage_ranks: Sequence[int], speeds: Sequence[float]
) -> list[float]:
    """For each rank, the time of its stages, as a part of that of all stages on a rank of speed 1.0."""
    work = [0.0] * len(speeds)
    whole = max(problem.compute[-1], 1)
    for stage, rank in enumerate(stage_ranks):
        part = (problem.compute[cuts[stage + 1]] - problem.compute[cuts[stage]]) / whole
        work[rank] += part / speeds[rank]
    return work


def balanced_cuts(problem: CutProblem, stage_ranks: Sequence[int], speeds: Sequence[float]) -> Cuts | None:
    """Cuts whose busiest rank has about as little to do as can be; None where there are too few places.

    Of equally good ones those with fewer bytes across.
    """
    if len(problem.places) <= len(stage_ranks):
        return None
    cuts = _shares(problem, stage_ranks, speeds)
    best = _value(problem, cuts, stage_ranks, speeds)
    for _ in range(_MOST_ROUNDS):
        before = best
        for changed in cut_moves(problem, cuts):
            value = _value(problem, changed, stage_ranks, speeds)
            if value < best:
                cuts, best = changed, value
        if best == before:
            break
    return cuts


def fewer_places(problem: CutProblem, most: int) -> CutProblem:
    """The same with at most so many places: of those near together, the ones with the fewest bytes across."""
    if len(problem.places) <= most:
        return problem
    whole = max(problem.compute[-1], 1)
    chosen: dict[int, int] = {}
    for place in problem.places[1:-1]:
        group = problem.compute[place] * (most - 2) // whole
        if group not in chosen or problem.crossing[place] < problem.crossing[chosen[group]]:
            chosen[group] = place
    places = (problem.places[0], *sorted(chosen.values()), problem.places[-1])
    return replace(problem, places=places)


def cut_moves(problem: CutProblem, cuts: Cuts) -> Iterator[Cuts]:
    """One border to another place near by, or several neighbouring ones, with the stages between them."""
    places = problem.places
    number = [bisect_left(places, place) for place in cuts]
    count = len(cuts) - 2
    runs = _RUNS if count < _MOST_BORDERS else _RUNS[:2]
    for size in (one for one in runs if one <= count):
        steps = _STEPS if size <= 2 else _STEPS[:1]
        for first in range(1, count - size + 2):
            last = first + size - 1
            for step in (sign * step for step in steps for sign in (1, -1)):
                moved = [index + step for index in number[first : last + 1]]
                if number[first - 1] < moved[0] and moved[-1] < number[last + 1]:
                    yield (*cuts[:first], *(places[index] for index in moved), *cuts[last + 1 :])


def weighed(problem: CutProblem, rule: str, units: Sequence[Unit]) -> CutProblem:
    """The problem of making stages of equal weight by one of `RULES`, whatever they send."""
    nothing = (0,) * len(problem.compute)
    weights = {"layers": [1 for _ in units], "parameters": [unit.parameter_bytes for unit in units]}
    compute = tuple(accumulate(weights[rule], initial=0)) if rule in weights else problem.compute
    return replace(problem, compute=compute, leave=nothing, enter=nothing, crossing=nothing)


def all_cuts(problem: CutProblem, stages: int, most: int) -> list[Cuts]:
    """All cuts into so many stages, where these are at most `most`; none where there are more."""
    inner = problem.places[1:-1]
    if comb(len(inner), stages - 1) > most:
        return []
    return [(0, *chosen, problem.places[-1]) for chosen in combinations(inner, stages - 1)]


def _shares(problem: CutProblem, stage_ranks: Sequence[int], speeds: Sequence[float]) -> Cuts:
    """Each border at the place nearest to where the shares of the stages before it end."""
    places, compute = problem.places, problem.compute
    totals = [compute[place] / max(compute[-1], 1) for place in places]
    shares = [speeds[rank] / stage_ranks.count(rank) for rank in stage_ranks]
    whole, passed = sum(shares), 0.0
    cuts = [0]
    for stage in range(len(stage_ranks) - 1):
        passed += shares[stage]
        target = totals[-1] * passed / whole
        index = bisect_left(totals, target)
        if index and target - totals[index - 1] <= totals[min(index, len(totals) - 1)] - target:
            index -= 1
        # Each stage before and after has to have a unit.
        index = min(max(index, cuts[-1] + 1), len(places) - len(stage_ranks) + stage)
        cuts.append(index)
    return tuple(places[index] for index in (*cuts, len(places) - 1))


def _value(
    problem: CutProblem, cuts: Cuts, stage_ranks: Sequence[int], speeds: Sequence[float]
) -> tuple[float, float, int]:
    work = rank_work(problem, cuts, stage_ranks, speeds)
    return max(work), sum(one * one for one in work), sum(problem.crossing[place] for place in cuts)
