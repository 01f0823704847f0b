"""From plans and simulated steps to the rows of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from partita.planning import Cluster, CutReason, Plan, Simulation, stage_costs
from partita.planning.simulating.span import Span
from partita.reporting.drawing.units import format_bytes, format_seconds
from partita.reporting.plan.modules import outermost_modules, summarise_modules
from partita.reporting.plan.plan_report import CutRow, MemoryLane, PlannedStageRow
from partita.reporting.step.data import StageRow

__all__ = [
    "critical_shares",
    "cut_rows",
    "memory_lanes",
    "planned_stage_rows",
    "recomputed_words",
    "stage_rows",
]

_MOST_ON_PATH = 8


def stage_rows(plan: Plan) -> tuple[StageRow, ...]:
    """Return the rows of the plan's table for the terminal."""
    return tuple(
        StageRow(
            stage=row.stage,
            rank=row.rank,
            modules=row.modules,
            parameters=row.parameters,
            parameter_bytes=row.parameter_bytes,
            forward_s=row.forward_s,
            backward_s=row.backward_s,
            send_bytes=row.send_bytes,
        )
        for row in planned_stage_rows(plan)
    )


def planned_stage_rows(plan: Plan) -> tuple[PlannedStageRow, ...]:
    """Return what the page says of each stage; times are those with what is computed again."""
    modules = outermost_modules([stage.modules for stage in plan.stages])
    rows = []
    for stage, rank, cost in zip(plan.stages, plan.placement, stage_costs(plan), strict=True):
        is_split = cost.backward_input_s is not None and cost.backward_weight_s is not None
        names = summarise_modules(modules[stage.index])
        rows.append(
            PlannedStageRow(
                stage=stage.index,
                rank=rank,
                modules=names or (f"units {stage.first_unit} to {stage.last_unit}",),
                parameters=stage.parameters,
                parameter_bytes=stage.parameter_bytes,
                forward_s=cost.forward_s,
                backward_s=cost.backward_s + cost.recompute_s,
                input_s=(cost.backward_input_s or 0.0) + cost.recompute_s if is_split else None,
                weight_s=cost.backward_weight_s if is_split else None,
                kept_bytes=cost.activation_bytes,
                static_bytes=cost.static_bytes,
                send_bytes=stage.send_bytes,
                recomputed=recomputed_words(plan, stage.index),
            )
        )
    return tuple(rows)


def recomputed_words(plan: Plan, index: int) -> str:
    """Say what a stage computes again, in words; nothing where it does not."""
    stage = plan.stages[index]
    if not stage.recompute:
        return ""
    if stage.recompute == ((stage.first_unit, stage.last_unit),):
        return "all of it"
    count = sum(last - first + 1 for first, last in stage.recompute)
    return f"{count} of {len(stage.units)} units"


def cut_rows(plan: Plan) -> tuple[CutRow, ...]:
    """Return what the page says of each cut, with reasons where the plan has them."""
    cluster = plan.cluster or Cluster(plan.ranks)
    reasons = {cut.border: cut for cut in plan.cuts}
    rows = []
    for stage, later in zip(plan.stages, plan.stages[1:], strict=False):
        here, there = plan.placement[stage.index], plan.placement[later.index]
        reason = reasons.get(stage.last_unit)
        rows.append(
            CutRow(
                stage=stage.index,
                before=stage.modules[-1] if stage.modules else stage.units[-1],
                after=later.modules[0] if later.modules else later.units[0],
                crossing_bytes=stage.send_bytes,
                transfer_s=0.0 if here == there else cluster.transfer_s(stage.send_bytes, here, there),
                ranks=(here, there),
                reason="" if reason is None else format_seconds(reason.makespan_s),
                other="" if reason is None else _other_place(reason),
            )
        )
    return tuple(rows)


def _other_place(cut: CutReason) -> str:
    if cut.next_border is None or cut.next_makespan_s is None or cut.next_crossing_bytes is None:
        return "no other place fits"
    moved = cut.next_border - cut.border
    units = "1 unit" if abs(moved) == 1 else f"{abs(moved)} units"
    return (
        f"{units} {'later' if moved > 0 else 'earlier'}: {format_seconds(cut.next_makespan_s)}, "
        f"{format_bytes(cut.next_crossing_bytes)} across"
    )


def memory_lanes(
    simulation: Simulation, limits: Sequence[float | None], *, divided_by: float = 1.0
) -> tuple[MemoryLane, ...]:
    """Return what each rank holds over a simulated step.

    Args:
        simulation: the step.
        limits: for each rank, what it may hold in the report's unit; None where there is no limit.
        divided_by: how many bytes of the simulation are one of the report's unit.
    """
    return tuple(
        MemoryLane(rank, tuple((step.time_s, step.bytes / divided_by) for step in steps), limit)
        for rank, (steps, limit) in enumerate(zip(simulation.memory, limits, strict=True))
    )


def critical_shares(simulation: Simulation) -> tuple[tuple[str, float], ...]:
    """Add up the critical path of a step: seconds of the passes of each rank, and of all messages.

    The largest part comes first; what is left of many ranks is added up.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in simulation.critical_path:
        seconds[_on_path(span)] += span.seconds
    ordered = sorted((item for item in seconds.items() if item[1]), key=lambda item: -item[1])
    first, rest = ordered[:_MOST_ON_PATH], ordered[_MOST_ON_PATH:]
    if len(rest) < 2:
        return tuple(ordered)
    return (*first, (f"{len(rest)} others", sum(time_s for _, time_s in rest)))


def _on_path(span: Span) -> str:
    if span.action.is_communication:
        return "messages"
    if span.action.is_whole_stage:
        return "gathering parameters, reducing gradients"
    return f"rank {span.rank}"
