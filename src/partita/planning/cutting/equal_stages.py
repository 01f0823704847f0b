"""Cuts of which many stages are equal: runs of units of the same kinds, in the same order. Compiled, these
are one.

How many stages differ is no sum over stages, which a program over (number of stages, border) could make
small. So each stage counts as the n-th part of one where n stages can be like it, and these parts add up to
about that number; then as the n-th part where the best cuts so far have n of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from operator import add

from partita.planning.costs.cost_model import CostModel
from partita.planning.costs.recompute import Regions
from partita.planning.cutting._cuts import CutProblem, Cuts

__all__ = ["Kinds", "cuts_with_equal_stages", "distinct_stages", "equal_cuts", "unit_kinds"]

Kinds = tuple[int, ...]
"""For each unit a number, the same for equal ones."""

_WHOLE = 720_720
"""A number that all numbers up to 16 divide."""
_MOST_PAIRS = 400_000
_BOUNDS = 4
_ROUNDS = 3


def unit_kinds(costs: CostModel) -> Kinds:
    """The kinds of the units; a unit that has none is like no other."""
    numbers: dict[Hashable, int] = {}
    return tuple(
        numbers.setdefault((unit.name,) if unit.kind is None else unit.kind, len(numbers))
        for unit in costs.units
    )


def distinct_stages(kinds: Kinds, cuts: Sequence[int], regions: Sequence[Regions] = ()) -> int:
    """How many of the stages differ from each other.

    Args:
        kinds: of the units.
        cuts: the places of all borders, ends included.
        regions: for each stage, what it recomputes.

    >>> distinct_stages((0, 1, 2, 1, 2, 3), cuts=(0, 1, 3, 5, 6))
    3
    """
    again = regions or ((),) * (len(cuts) - 1)
    return len(
        {
            (kinds[start:end], tuple((first - start, last - start) for first, last in own))
            for (start, end), own in zip(pairwise(cuts), again, strict=True)
        }
    )


def cuts_with_equal_stages(problem: CutProblem, kinds: Kinds, cuts: Cuts, part: float) -> Cuts:
    """The cuts, or others with fewer stages that differ whose slowest one takes no longer than theirs by more
    than this part of it.
    """
    slowest = max(problem.time(*ends) for ends in pairwise(cuts))
    places = (problem.places,) * (problem.stages - 1)
    others = []
    for step in range(_BOUNDS + 1):
        bound = slowest + int(slowest * part * step / _BOUNDS)

        def value(stage: int, start: int, end: int, bound: int = bound) -> tuple[int, ...] | None:
            time = problem.time(start, end)
            fits = time <= bound and problem.fits(stage, start, end)
            return (problem.crossing[end], time * time) if fits else None

        others.append(equal_cuts(problem, kinds, places, bound, value))
    return min(filter(None, (cuts, *others)), key=lambda one: distinct_stages(kinds, one))


def equal_cuts(
    problem: CutProblem,
    kinds: Kinds,
    places: Sequence[Sequence[int]],
    longest: int,
    value: Callable[[int, int, int], tuple[int, ...] | None],
) -> Cuts | None:
    """Cuts of which few stages differ; of those, the ones whose values add up to the least. None where there
    are none, or where there are too many to look at.

    Args:
        kinds: of the units.
        places: for each border, where it may lie, in order.
        longest: the most that a stage may compute.
        value: of a stage, by its number and its two places; None where it can't be.
    """
    # 1. All stages that there can be, each known by a number.
    numbers: dict[tuple[int, int], int] = {}
    stages: list[dict[tuple[int, int], tuple[int, tuple[int, ...]]]] = []
    starts: Sequence[int] = (0,)
    looked_at = 0
    for stage, ends in enumerate((*places, (len(kinds),))):
        stages.append({})
        usable = set(ends)
        for start in starts:
            number = -1  # then that of the stage without its last unit, together with this unit's kind
            for end in range(start + 1, ends[-1] + 1):
                number = numbers.setdefault((number, kinds[end - 1]), len(numbers))
                if problem.compute[end] - problem.compute[start] > longest:
                    break
                looked_at += 1
                if end in usable and (own := value(stage, start, end)) is not None:
                    stages[-1][start, end] = number, own
            if looked_at > _MOST_PAIRS:
                return None
        starts = sorted({end for _, end in stages[-1]})
    # 2. The best by what each counts, which then is set by the best.
    best = None
    counts = _most_at_once(stages)
    for _ in range(_ROUNDS):
        cuts = _least(stages, counts)
        if cuts is None:
            return None
        best = min(best or cuts, cuts, key=lambda one: distinct_stages(kinds, one))
        uses = Counter(own[ends][0] for own, ends in zip(stages, pairwise(best), strict=True))
        counts = {number: uses.get(number, 1) for number in counts}
    return best


_Stages = Sequence[Mapping[tuple[int, int], tuple[int, tuple[int, ...]]]]
"""By number of the stage and its two places: the number that equal stages have, and its value."""


def _most_at_once(stages: _Stages) -> dict[int, int]:
    """For each number, how many stages of one cut can have it, as far as their own places go."""
    counts: dict[int, int] = {}
    behind: dict[int, int] = {}
    for own in stages:
        counted: set[int] = set()
        for start, end in sorted(own):
            number, _ = own[start, end]
            if number not in counted and start >= behind.get(number, 0):
                counted.add(number)
                counts[number] = counts.get(number, 0) + 1
                behind[number] = end
    return counts


def _least(stages: _Stages, counts: Mapping[int, int]) -> Cuts | None:
    """The cuts with the least sum of what their stages count, then of their values."""
    layer: dict[int, tuple[int, ...]] = {0: ()}
    back: list[dict[int, int]] = []
    for own in stages:
        following: dict[int, tuple[int, ...]] = {}
        came_from: dict[int, int] = {}
        for (start, end), (number, value) in own.items():
            before = layer.get(start)
            if before is None:
                continue
            counted = (_WHOLE // counts.get(number, 1), *value)
            total = tuple(map(add, before, counted)) if before else counted
            if end not in following or total < following[end]:
                following[end] = total
                came_from[end] = start
        layer = following
        back.append(came_from)
    if not layer:
        return None
    (end,) = layer  # the last stage ends with the line
    cuts = [end]
    for came_from in reversed(back):
        cuts.append(came_from[cuts[-1]])
    return tuple(reversed(cuts))
