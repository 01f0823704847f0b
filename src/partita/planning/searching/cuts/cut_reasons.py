"""Why each cut of a plan is where it is: what the step would take with the next best one in its place."""

from __future__ import annotations

from bisect import bisect_left

from partita.errors import PlanError
from partita.planning.costs.cost_model import CostModel
from partita.planning.cutting._cuts import Cuts
from partita.planning.generators.plan_schedule import schedule_of
from partita.planning.hardware.cluster import Cluster
from partita.planning.plan import CutReason, Plan
from partita.planning.searching.layouts import Layout
from partita.planning.searching.orders.clock import Rows, rows_of
from partita.planning.searching.trial import Case, Trial

__all__ = ["explain_cuts"]

_MOST_STEPS = 4
_MOST_PASSES = 6_000_000
"""So often passes are timed, in all, before only one other place is looked at for each cut."""


def explain_cuts(costs: CostModel, plan: Plan) -> tuple[CutReason, ...]:
    """For each cut of a plan, the simulated step with it and with the best of the places next to it.

    The other cuts and the order of the passes stay as they are. Looked at are up to four places on each side,
    and of these those that fit the memory. Where there are very many cuts and passes it is one place for each
    cut: the first that fits of those next to it, that with the least work for the slowest rank first.

    Args:
        costs: what the plan was made from.
        plan: any plan of those costs.

    Raises:
        PlanError: the plan is not of these units.

    >>> from partita.planning import Unit, plan_stages
    >>> units = tuple(Unit(name, 1.0, 2.0) for name in "abcd")
    >>> costs = CostModel(units, (8, 8, 8))
    >>> [str(reason) for reason in explain_cuts(costs, plan_stages(costs, 2))]
    ["between 'b' and 'c' (8 bytes): the step takes 54 s; cut between 'c' and 'd' (8 bytes), 72 s"]
    """
    names = [unit.name for unit in costs.units]
    if list(plan.stage_of()) != names:
        raise PlanError(
            f"the plan has {len(plan.stage_of())} units, the costs {len(names)}, or of other names: give the "
            "costs that it was made from"
        )
    # The same order of passes throughout, and recomputation only where the plan has some.
    cluster = Cluster(plan.ranks) if plan.cluster is None else plan.cluster
    recomputes = any(stage.recompute for stage in plan.stages)
    case = Case(costs, cluster, plan.microbatches, plan.parameter_copies, recomputes)
    layout = Layout("plan", plan.placement, tuple(range(plan.ranks)))
    rows = rows_of(schedule_of(plan))
    cuts = (0, *(stage.last_unit + 1 for stage in plan.stages))
    regions = tuple(stage.recompute for stage in plan.stages)
    here = case.timed(plan.schedule, layout, cuts, rows, regions)
    timed = sum(map(len, rows)) * 2 * (len(cuts) - 2)
    steps = max(min(_MOST_STEPS, _MOST_PASSES // max(timed, 1)), 1)
    reasons = []
    for index in range(1, len(cuts) - 1):
        moved = _moved(case, here.cuts, index, steps)
        if timed > _MOST_PASSES:
            moved.sort(key=lambda cuts: max(case.problem(layout, cuts).work_s()))
        others = (_timed(case, here, layout, rows, index, cuts) for cuts in moved)
        fitting = (trial for trial in others if trial is not None)
        if timed > _MOST_PASSES:
            best = next(fitting, None)
        else:
            best = min(fitting, key=lambda trial: trial.key, default=None)
        reasons.append(_reason(costs, cuts[index], here.end_s, index, best))
    return tuple(reasons)


def _moved(case: Case, cuts: Cuts, index: int, steps: int) -> list[Cuts]:
    """The cuts with number `index` at other places near by."""
    places = [border + 1 for border in case.costs.allowed_borders]
    at = bisect_left(places, cuts[index])
    return [
        (*cuts[:index], place, *cuts[index + 1 :])
        for place in places[max(at - steps, 0) : at + steps + 1]
        if cuts[index - 1] < place < cuts[index + 1] and place != cuts[index]
    ]


def _timed(case: Case, here: Trial, layout: Layout, rows: Rows, index: int, cuts: Cuts) -> Trial | None:
    # What does not fit needs no time.
    # What is recomputed goes with the stages that stay.
    regions = tuple(
        () if stage in (index - 1, index) else chosen for stage, chosen in enumerate(here.regions)
    )
    return case.timed_if_it_fits(here.name, layout, cuts, rows, regions)


def _reason(costs: CostModel, place: int, end_s: float, index: int, best: Trial | None) -> CutReason:
    border = place - 1
    units, crossing = costs.units, costs.crossing_bytes
    names = units[border].name, units[place].name
    if best is None:
        return CutReason(border, *names, crossing[border], end_s)
    other = best.cuts[index]
    return CutReason(
        border,
        *names,
        crossing[border],
        end_s,
        other - 1,
        units[other - 1].name,
        units[other].name,
        crossing[other - 1],
        best.end_s,
    )
