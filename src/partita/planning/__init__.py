"""Plans, made from plain numbers: stages, schedules, simulation. Needs no torch.

>>> from partita.planning import CostModel, Unit, plan_stages, schedule_of, simulate
>>> units = tuple(Unit(f"block{index}", forward_s=1.0, backward_s=2.0) for index in range(8))
>>> plan = plan_stages(CostModel(units, crossing_bytes=(0,) * 7), stages=4, microbatches=12)
>>> simulate(schedule_of(plan), plan).bubble  # (stages - 1) / (microbatches + stages - 1)
0.19999999999999996
"""

from __future__ import annotations

from partita.planning.actions import Action, ActionKind, overlap
from partita.planning.arrivals import SendEnds, send_ends
from partita.planning.buckets import BucketPlan, Gradient, plan_buckets
from partita.planning.cluster import Cluster
from partita.planning.critical_path import IdleTime
from partita.planning.cut_reasons import explain_cuts
from partita.planning.devices import Device, devices, get_device, parse_devices
from partita.planning.generators.registry import ScheduleKind, get_schedule, schedule_names
from partita.planning.links import LinkLevel, PairLink
from partita.planning.lower import lower
from partita.planning.memory import MemoryStep
from partita.planning.merge_backward import merge_backward
from partita.planning.optimal import OptimalSchedule, optimal_schedule
from partita.planning.placement import loop_placement, v_placement
from partita.planning.plan import Change, CutReason, Plan, StagePlan
from partita.planning.plan_schedule import schedule_of
from partita.planning.recompute import recomputed_cost
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
    "CutReason",
    "Device",
    "Gradient",
    "IdleTime",
    "LinkLevel",
    "MemoryStep",
    "OptimalSchedule",
    "PairLink",
    "Plan",
    "Schedule",
    "ScheduleKind",
    "SendEnds",
    "Simulation",
    "Span",
    "StageCost",
    "StagePlan",
    "Unit",
    "devices",
    "explain_cuts",
    "get_device",
    "get_schedule",
    "loop_placement",
    "lower",
    "merge_backward",
    "optimal_schedule",
    "overlap",
    "parse_devices",
    "plan_buckets",
    "plan_stages",
    "recomputed_cost",
    "schedule_names",
    "schedule_of",
    "search",
    "send_ends",
    "simulate",
    "stage_costs",
    "v_placement",
    "validate",
    "with_reduce_grad",
    "with_unshard",
]
