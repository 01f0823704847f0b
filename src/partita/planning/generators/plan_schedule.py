"""What every rank of a plan does: one place for simulator, report and runtime."""

from __future__ import annotations

from partita.planning.generators.registry import get_schedule
from partita.planning.plan import Plan
from partita.planning.schedules.schedule import Schedule

__all__ = ["schedule_of"]


def schedule_of(plan: Plan) -> Schedule:
    """The actions of a plan: its own order, or what the name of its schedule says.

    Raises:
        ScheduleError: the plan has no order, and a schedule that is unknown or can't serve its placement.

    >>> from partita.planning import CostModel, Unit, plan_stages
    >>> plan = plan_stages(CostModel((Unit("a", 1.0, 2.0), Unit("b", 1.0, 2.0)), (8,)), 2, microbatches=2)
    >>> [str(action) for action in schedule_of(plan).actions(1)]
    ['1F0', '1B0', '1F1', '1B1']
    """
    if plan.order is not None:
        return plan.order
    kind = get_schedule(plan.schedule)
    if plan.placement == kind.placement(len(plan.stages), plan.ranks):
        return kind(len(plan.stages), plan.microbatches, plan.ranks)
    return kind(len(plan.stages), plan.microbatches, placement=plan.placement)
