"""Trials of which more stages are equal, for stages that are compiled: equal ones are compiled once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from partita.planning.cutting._cuts import CutProblem, Cuts
from partita.planning.cutting.equal_stages import Kinds, distinct_stages, equal_cuts, unit_kinds
from partita.planning.searching.cuts.balance import cut_moves
from partita.planning.searching.orders.improve import Budget
from partita.planning.searching.trial import Case, Trial

__all__ = ["equal_trial"]

_REACHES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)
"""So far a border may move for stages to be equal, in stages of mean length."""


def equal_trial(case: Case, trial: Trial, problem: CutProblem, most_s: float, budget: Budget) -> Trial:
    """The same order on the same ranks with as few stages that differ as were found; of equally few, the
    fastest.

    Args:
        problem: the model as it may be cut.
        most_s: the longest that the step may take.
        budget: how many passes may be timed.
    """
    kinds = unit_kinds(case.costs)
    near = dict.fromkeys(_near(problem, kinds, trial.cuts, reach) for reach in _REACHES)
    starts = [cuts for cuts in near if cuts is not None]
    best = trial
    for number, cuts in enumerate(starts):
        timed = case.timed(trial.name, trial.layout, cuts, trial.rows)
        moved = _moved(case, timed, problem, most_s, budget.share(1 / (len(starts) - number)))
        if moved.fits and moved.end_s <= most_s:
            best = min(best, moved, key=lambda one: (_count_distinct(case, one), one.key))
    return best


def _near(problem: CutProblem, kinds: Kinds, cuts: Cuts, reach: float) -> Cuts | None:
    """Cuts of which few stages differ, with each border near where it is."""
    compute = problem.compute
    most = int(reach * compute[-1] / problem.stages)

    def places(cut: int) -> tuple[int, ...]:
        first = bisect_left(compute, compute[cut] - most)
        last = bisect_right(compute, compute[cut] + most) - 1
        return tuple(place for place in problem.places[1:-1] if first <= place <= last)

    def value(stage: int, _start: int, end: int) -> tuple[int, ...]:
        return (abs(compute[end] - compute[cuts[stage + 1]]),)

    return equal_cuts(problem, kinds, [places(cut) for cut in cuts[1:-1]], compute[-1], value)


def _moved(case: Case, trial: Trial, problem: CutProblem, most_s: float, budget: Budget) -> Trial:
    """The same with borders moved for as long as fewer stages differ within `most_s`, or no more, and the
    step is faster.
    """
    size, kinds = sum(map(len, trial.rows)) + 40 * len(trial.cuts), unit_kinds(case.costs)
    distinct, improved = _count_distinct(case, trial), True
    while improved:
        improved = False
        for cuts in cut_moves(problem, trial.cuts):
            if distinct_stages(kinds, cuts) > distinct:
                continue
            if not budget.take(size):
                return trial
            result = case.timed(trial.name, trial.layout, cuts, trial.rows)
            count = _count_distinct(case, result)
            fewer = count < distinct and result.fits and result.end_s <= most_s
            if fewer or (count <= distinct and result.key < trial.key):
                trial, distinct, improved = result, count, True
                break
    return trial


def _count_distinct(case: Case, trial: Trial) -> int:
    """How many of a trial's stages differ from each other."""
    return distinct_stages(unit_kinds(case.costs), trial.cuts, trial.regions)
