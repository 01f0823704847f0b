"""From a plan to what a rank runs: its stages, and the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from partita.errors import PlanError
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.schedule_kinds import CustomSchedule, get_schedule_class
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.planning import Plan
from partita.runtime import Comm
from partita.runtime.comms.group_or_comm import check_group_or_comm

__all__ = ["planned_schedule", "planned_stages"]


def planned_stages(plan: Plan, comm: Comm | None, group: dist.ProcessGroup | None) -> list[int]:
    """Return the stages that the plan places on this rank.

    Raises:
        ArgumentError: both ``comm`` and ``group``, or one that is not what its name says.
        PlanError: it is for another number of ranks.
    """
    check_group_or_comm(group, comm)
    if comm is not None:
        rank, size = comm.rank, comm.size
    elif dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(group), dist.get_world_size(group)
    else:
        raise PlanError(
            f"the plan is for {plan.ranks} ranks and torch.distributed is not initialised: call "
            "init_process_group() before, or give a comm"
        )
    if plan.ranks != size:
        raise PlanError(
            f"the plan is for {plan.ranks} ranks and the group has {size}: give a group of {plan.ranks}, or "
            f"plan for {size}"
        )
    return [stage for stage, home in enumerate(plan.placement) if home == rank]


def planned_schedule(
    plan: Plan, stages: Sequence[Stage], loss_fn: Callable[..., Tensor] | None, **options: Any
) -> PipelineSchedule:
    """Return the schedule of a plan: its own order of actions, or the one that it names. What it does with
    gradients of tied parameters is the plan's, unless the options say.

    Raises:
        PlanError: the plan leaves this rank without a stage, or is for another number of microbatches.
    """
    if not stages:
        raise PlanError(f"the plan leaves a rank without a stage, placement is {plan.placement}: plan again")
    count = options.pop("n_microbatches", plan.microbatches)
    if count != plan.microbatches:
        raise PlanError(
            f"n_microbatches is {count!r:.40}, and the plan is for {plan.microbatches}: plan for as many "
            "(pipeline(..., microbatches=...)), and leave it out here"
        )
    options = {"tied_gradients": plan.tied_gradients, **options}
    if plan.order is not None:
        return CustomSchedule(stages, plan.order, loss_fn, **options)
    return get_schedule_class(plan.schedule)(stages, plan.microbatches, loss_fn, **options)
