"""Cuts from a plan, and the same plan on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from partita.errors import PlanError
from partita.planning import CostModel, Plan
from partita.runtime import ProcessGroupComm

__all__ = ["planned_cuts", "planned_units", "same_on_all_ranks"]


def planned_units(plan: Plan) -> list[str]:
    """Return the names of a plan's units, in order."""
    return [name for stage in plan.stages for name in stage.units]


def same_on_all_ranks(plan: Plan) -> Plan:
    """Return rank 0's plan: every rank measures other times, and a cut must be the same on all."""
    if not dist.is_available() or not dist.is_initialized():
        return plan
    with ProcessGroupComm.from_group() as comm:
        return Plan.from_json(comm.all_gather_object(plan.to_json())[0])


def planned_cuts(plan: Plan, costs: CostModel, ends: Sequence[int]) -> list[int]:
    """Return those of ``ends`` at which a stage of the plan ends.

    Args:
        ends: for each unit of the model but the last, the position at which it ends.

    Raises:
        PlanError: the plan has other units than the model.
    """
    planned = planned_units(plan)
    measured = [unit.name for unit in costs.units]
    if planned != measured:
        missing = next(
            (name for name, other in zip(planned, measured, strict=False) if name != other), "its length"
        )
        raise PlanError(
            f"the plan was made for another model or other shapes: it has {len(planned)} units, this model "
            f"{len(measured)}, and they first differ at {missing!r}; measure and plan again"
        )
    return [ends[stage.last_unit] for stage in plan.stages[:-1]]
