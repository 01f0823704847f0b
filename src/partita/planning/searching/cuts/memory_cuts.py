"""Cuts and recomputation for ranks with little memory, whatever the order of passes will be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from partita.planning.costs.recompute import Regions
from partita.planning.cutting._cuts import CutProblem, Cuts
from partita.planning.searching.layouts import Layout
from partita.planning.searching.trial import Case

__all__ = ["FittingCuts", "cuts_in_memory", "stage_bytes"]

_HALVINGS = 12


class FittingCuts(NamedTuple):
    """Cuts, what each stage recomputes, and the seconds of the busiest stage for one microbatch."""

    cuts: Cuts
    regions: tuple[Regions, ...]
    busiest_s: float


def cuts_in_memory(
    case: Case, problem: CutProblem, layout: Layout, in_flight: Sequence[int]
) -> FittingCuts | None:
    """The cuts with the least busy stages in which each stage fits with so many microbatches in flight.

    Stages that share a rank share its memory evenly. A stage recomputes the least that will do. For a bound
    on the seconds of a stage, each one takes as many units as it may; the bound is halved in until it is
    tight.
    """
    cost = case.stage(0, problem.places[-1])
    high = (
        3.0
        * (cost.forward_s + cost.backward_s)
        / min(case.cluster.speed(rank) for rank in layout.stage_ranks)
    )
    best = _fill(case, problem, layout, in_flight, high)
    low = 0.0
    if best is None:
        return None
    for _ in range(_HALVINGS):
        high = best.busiest_s
        if high - low <= 1e-3 * high:
            break
        middle = (low + high) / 2
        attempt = _fill(case, problem, layout, in_flight, middle)
        if attempt is None:
            low = middle
        else:
            best = attempt
    return best


def _fill(
    case: Case, problem: CutProblem, layout: Layout, in_flight: Sequence[int], bound_s: float
) -> FittingCuts | None:
    places, stage_ranks = problem.places, layout.stage_ranks
    stages, index, busiest_s = len(stage_ranks), 0, 0.0
    cuts, regions = [0], list[Regions]()
    for stage, rank in enumerate(stage_ranks):
        limit = case.cluster.memory(rank)
        share = None if limit is None else limit // stage_ranks.count(rank)
        last = len(places) - (stages - stage)
        chosen: tuple[int, float, Regions] | None = None
        # The longest stage that may be, by halves; the last stage has to take all that is left.
        shortest = last if stage == stages - 1 else index + 1
        low, high = shortest - 1, last + 1
        while high - low > 1:
            end = shortest if low < shortest else (low + high) // 2
            speed = case.cluster.speed(rank)
            ends = places[index], places[end]
            option = _cheapest(case, *ends, share, in_flight[stage], bound_s * speed)
            if option is None:
                high = end
            else:
                low, chosen = end, (end, option[0] / speed, option[1])
        if chosen is None:
            return None
        index = chosen[0]
        busiest_s = max(busiest_s, chosen[1])
        cuts.append(places[index])
        regions.append(chosen[2])
    return FittingCuts(tuple(cuts), tuple(regions), busiest_s)


def _cheapest(
    case: Case, start: int, end: int, share: int | None, in_flight: int, most_s: float
) -> tuple[float, Regions] | None:
    """Seconds of the stage for one microbatch, and the option for it that takes the least: at most `most_s`.

    None where there is none that fits.
    """
    whole = case.stage(start, end)
    seconds = whole.forward_s + whole.backward_s
    if seconds > most_s:
        return None
    if share is None or stage_bytes(case, start, end, (), in_flight) <= share:
        return seconds, ()
    best: tuple[float, Regions] | None = None
    for regions in case.options(start, end):
        recomputed_s = seconds + case.stage(start, end, regions).recompute_s
        if recomputed_s > most_s or (best is not None and recomputed_s >= best[0]):
            continue
        if stage_bytes(case, start, end, regions, in_flight) <= share:
            best = recomputed_s, regions
    return best


def stage_bytes(case: Case, start: int, end: int, regions: Regions, in_flight: int) -> int:
    """Return the most bytes that the units from ``start`` up to ``end`` take as one stage: what they always
    hold, what ``in_flight`` microbatches keep for their backward passes, and what one pass works with.
    """
    cost = case.stage(start, end, regions)
    backward = cost.recompute_bytes + cost.backward_workspace_bytes
    return cost.static_bytes + in_flight * cost.activation_bytes + max(cost.forward_workspace_bytes, backward)
