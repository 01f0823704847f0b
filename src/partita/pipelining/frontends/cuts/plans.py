"""Cuts from a plan."""

from __future__ import annotations

from collections.abc import Sequence

from partita.errors import PlanError
from partita.planning import Plan

__all__ = ["planned_cuts", "planned_units"]


def planned_units(plan: Plan) -> list[str]:
    """Return the names of a plan's units, in order."""
    return [name for stage in plan.stages for name in stage.units]


def planned_cuts(plan: Plan, units: Sequence[str], ends: Sequence[int]) -> list[int]:
    """Return those of ``ends`` at which a stage of the plan ends.

    Args:
        units: the names of the model's units.
        ends: for each unit of the model but the last, the position at which it ends.

    Raises:
        PlanError: the plan has other units than the model.
    """
    planned = planned_units(plan)
    measured = list(units)
    if planned != measured:
        missing = next(
            (name for name, other in zip(planned, measured, strict=False) if name != other), "its length"
        )
        raise PlanError(
            f"the plan was made for another model or other shapes: it has {len(planned)} units, this model "
            f"{len(measured)}, and they first differ at {missing!r}; measure and plan again"
        )
    return [ends[stage.last_unit] for stage in plan.stages[:-1]]
