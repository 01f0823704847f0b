"""From a trial to a plan and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from partita.planning.costs.tied_gradients import summed_gradients, tied_gradients_of, tied_messages
from partita.planning.cutting.make_stage import make_stage
from partita.planning.generators.plan_schedule import schedule_of
from partita.planning.generators.registry import get_schedule, schedule_names
from partita.planning.plan import Plan
from partita.planning.schedules.actions import Action
from partita.planning.schedules.schedule import Schedule
from partita.planning.searching.layouts import Layout
from partita.planning.searching.orders.clock import make_schedule, run_rows
from partita.planning.searching.trial import Case, Trial
from partita.planning.simulating.summary import step_summary

__all__ = ["Candidate", "candidate_of"]


@dataclass(frozen=True)
class Candidate:
    """A plan and what its simulated step costs.

    Attributes:
        plan: the stages with what they recompute, their ranks and the schedule.
        makespan_s: seconds of one step.
        bubble: the fraction of the ranks' time in which they idle.
        peak_bytes: for each rank, the most memory that it holds at once.
        span_s: the longest time of a rank from its first pass to its last one.
        span_bubble: `bubble` with the span in place of the makespan.
    """

    plan: Plan
    makespan_s: float
    bubble: float
    peak_bytes: tuple[int, ...]
    span_s: float = 0.0
    span_bubble: float = 0.0


def candidate_of(case: Case, trial: Trial) -> Candidate:
    """The plan of a trial, simulated.

    Where ranks share links, passes run together or gradients of tied parameters travel or are summed, only
    the simulator knows the times; else the clock of the search has the same ones.
    """
    plan = _plan(case, trial)
    if _needs_simulation(case, trial):
        result = step_summary(schedule_of(plan), plan)
        return Candidate(
            plan, result.makespan_s, result.bubble, result.peak_bytes, result.span_s, result.span_bubble
        )
    problem = case.problem(trial.layout, trial.cuts, trial.regions)
    timing = run_rows(problem, trial.rows)
    if timing is None:
        raise AssertionError("unreachable: a trial comes to an end")
    seconds = problem.seconds
    busy_s, span_s = 0.0, 0.0
    for row, starts in zip(trial.rows, timing.starts, strict=True):
        of_rank_s = 0.0
        for kind, stage, _ in row:
            of_rank_s += seconds[kind][stage]
        busy_s += of_rank_s
        last = row[-1]
        span_s = max(span_s, starts[-1] + seconds[last[0]][last[1]] - starts[0])
    ranks = len(trial.rows)
    return Candidate(
        plan,
        timing.end_s,
        1.0 - busy_s / (ranks * timing.end_s) if timing.end_s else 0.0,
        case.peaks(trial.layout, trial.cuts, trial.regions, trial.rows),
        span_s,
        1.0 - busy_s / (ranks * span_s) if span_s else 0.0,
    )


def _needs_simulation(case: Case, trial: Trial) -> bool:
    ranks = trial.layout.stage_ranks
    pairs = {pair for one, other in pairwise(ranks) if one != other for pair in ((one, other), (other, one))}
    links = [link for pair in pairs for link in case.cluster.links(*pair)]
    is_tied = any((*tied_messages(case.costs, trial.cuts), *summed_gradients(case.costs, trial.cuts)))
    skips = bool(case.costs.spanning)
    return is_tied or skips or trial.name == "DualPipeV" or len(set(links)) < len(links)


def _plan(case: Case, trial: Trial) -> Plan:
    placement = trial.layout.stage_ranks
    costs = case.stages(trial.layout, trial.cuts, trial.regions)
    in_flight = _in_flight(trial)
    shared, tied = case.shared(trial.layout, trial.cuts), tied_messages(case.costs, trial.cuts)
    summed = summed_gradients(case.costs, trial.cuts)
    stages = tuple(
        make_stage(
            case.costs,
            index,
            start,
            end - 1,
            regions=trial.regions[index],
            time_s=(costs[index].forward_s + costs[index].backward_s + costs[index].recompute_s)
            / case.cluster.speed(placement[index]),
            peak_bytes=costs[index].static_bytes + in_flight[index] * costs[index].activation_bytes,
            shared=shared[index],
            tied=tied[index],
            summed=summed[index],
        )
        for index, (start, end) in enumerate(pairwise(trial.cuts))
    )
    return Plan(
        stages=stages,
        placement=placement,
        schedule=trial.name,
        microbatches=case.microbatches,
        bottleneck_s=max(stage.time_s for stage in stages),
        parameter_copies=float(case.parameter_copies),
        cluster=case.cluster,
        order=_order(case, trial),
        tied_gradients=tied_gradients_of(case.costs),
    )


def _in_flight(trial: Trial) -> list[int]:
    now, most = [0] * len(trial.regions), [0] * len(trial.regions)
    for row in trial.rows:
        for kind, stage, _ in row:
            if kind != 1:
                now[stage] += 1 if kind == 0 else -1
                most[stage] = max(most[stage], now[stage])
    return most


def _order(case: Case, trial: Trial) -> Schedule | None:
    """The actions, where the name of the schedule does not say."""
    layout = trial.layout
    if trial.name not in schedule_names() or get_schedule(trial.name).for_costs is not None:
        return make_schedule(trial.name, layout.stage_ranks, case.microbatches, trial.rows)
    if layout.stage_ranks == layout.own:
        return None
    schedule = get_schedule(trial.name)(len(layout.own), case.microbatches, case.cluster.ranks)
    return _relabelled(schedule, layout)


def _relabelled(schedule: Schedule, layout: Layout) -> Schedule:
    rows: list[tuple[Action | None, ...]] = [()] * schedule.ranks
    for place, rank in enumerate(layout.ranks):
        rows[rank] = schedule.actions(place)
    return replace(schedule, stage_ranks=layout.stage_ranks, rows=tuple(rows))
