"""Plans, made from plain numbers: stages, schedules, simulation. Needs no torch.

>>> from partita.planning import CostModel, Unit, plan_stages, schedule_of, simulate
>>> units = tuple(Unit(f"block{index}", forward_s=1.0, backward_s=2.0) for index in range(8))
>>> plan = plan_stages(CostModel(units, crossing_bytes=(0,) * 7), stages=4, microbatches=12)
>>> simulate(schedule_of(plan), plan).bubble  # (stages - 1) / (microbatches + stages - 1)
0.19999999999999996
"""

from __future__ import annotations

from partita.planning.costs.cost_model import CostModel
from partita.planning.costs.costed_for import CostedFor
from partita.planning.costs.other_device import costs_for_device
from partita.planning.costs.recompute import recomputed_cost
from partita.planning.costs.stage_cost import StageCost
from partita.planning.costs.tied_gradients import reduced_tied_gradients
from partita.planning.costs.units import TiedUnits, Unit
from partita.planning.costs.whole_stage import with_reduce_grad, with_unshard
from partita.planning.cutting.buckets import BucketPlan, Gradient, plan_buckets
from partita.planning.generators.plan_schedule import schedule_of
from partita.planning.generators.registry import ScheduleKind, get_schedule, schedule_names
from partita.planning.hardware.cluster import Cluster
from partita.planning.hardware.devices import Device, devices, get_device, parse_devices
from partita.planning.hardware.links import LinkLevel, PairLink
from partita.planning.hardware.placement import loop_placement, v_placement
from partita.planning.plan import Change, CutReason, Plan, StagePlan
from partita.planning.schedules.actions import Action, ActionKind, overlap
from partita.planning.schedules.arrivals import SendEnds, send_ends
from partita.planning.schedules.lower import lower
from partita.planning.schedules.merge_backward import merge_backward
from partita.planning.schedules.schedule import Schedule
from partita.planning.schedules.validate import validate
from partita.planning.searching.cuts.cut_reasons import explain_cuts
from partita.planning.searching.optimal import OptimalSchedule, optimal_schedule
from partita.planning.searching.search import Candidate, search
from partita.planning.searching.stages import plan_stages
from partita.planning.simulating.critical_path import IdleTime
from partita.planning.simulating.memory import MemoryStep
from partita.planning.simulating.simulate import Simulation, Span, simulate, stage_costs

__all__ = [
    "Action",
    "ActionKind",
    "BucketPlan",
    "Candidate",
    "Change",
    "Cluster",
    "CostModel",
    "CostedFor",
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
    "TiedUnits",
    "Unit",
    "costs_for_device",
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
    "reduced_tied_gradients",
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
