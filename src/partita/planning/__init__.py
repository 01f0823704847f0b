"""Plans, made from plain numbers: stages, schedules, simulation. Needs no torch.

>>> from partita.planning import CostModel, Unit, get_schedule, plan_stages, simulate
>>> units = tuple(Unit(f"block{index}", forward_s=1.0, backward_s=2.0) for index in range(8))
>>> plan = plan_stages(CostModel(units, crossing_bytes=(0,) * 7), stages=4, microbatches=12)
>>> schedule = get_schedule(plan.schedule)(len(plan.stages), plan.microbatches, plan.ranks)
>>> simulate(schedule, plan).bubble  # (stages - 1) / (microbatches + stages - 1)
0.19999999999999996
"""

from __future__ import annotations

from partita.planning.actions import Action, ActionKind, overlap
from partita.planning.arrivals import SendEnds, send_ends
from partita.planning.buckets import BucketPlan, Gradient, plan_buckets
from partita.planning.cluster import Cluster
from partita.planning.generators.registry import ScheduleKind, get_schedule, schedule_names
from partita.planning.lower import lower
from partita.planning.merge_backward import merge_backward
from partita.planning.placement import loop_placement, v_placement
from partita.planning.plan import Change, Plan, StagePlan
from partita.planning.schedule import Schedule
from partita.planning.search import Candidate, search
from partita.planning.simulate import Simulation, Span, simulate, stage_costs
from partita.planning.stage_cost import StageCost
from partita.planning.stages import plan_stages
from partita.planning.units import CostModel, Unit
from partita.planning.validate import validate
from partita.planning.whole_stage import with_reduce_grad, with_unshard

__all__ = [
    "Action",
    "ActionKind",
    "BucketPlan",
    "Candidate",
    "Change",
    "Cluster",
    "CostModel",
    "Gradient",
    "Plan",
    "Schedule",
    "ScheduleKind",
    "SendEnds",
    "Simulation",
    "Span",
    "StageCost",
    "StagePlan",
    "Unit",
    "get_schedule",
    "loop_placement",
    "lower",
    "merge_backward",
    "overlap",
    "plan_buckets",
    "plan_stages",
    "schedule_names",
    "search",
    "send_ends",
    "simulate",
    "stage_costs",
    "v_placement",
    "validate",
    "with_reduce_grad",
    "with_unshard",
]
