"""What a simulated step comes to, without the time of each of its passes: for those who try many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.garbage import no_garbage_collection
from partita.planning.costs.stage_cost import StageCost
from partita.planning.hardware.cluster import Cluster
from partita.planning.plan import Plan
from partita.planning.schedules.schedule import Schedule
from partita.planning.simulating._clock import bubble_of, step_times
from partita.planning.simulating.memory import peak_bytes
from partita.planning.simulating.simulate import stage_costs

__all__ = ["StepSummary", "step_summary"]


@dataclass(frozen=True)
class StepSummary:
    """The numbers of a `Simulation` that concern the step as a whole.

    Attributes:
        makespan_s: seconds from the first action's start to the last one's end.
        bubble: the fraction of the ranks' time in which they don't work.
        peak_bytes: for each rank, the most memory that it holds at once.
        span_s: the longest time of a rank from its first pass to its last one.
        span_bubble: `bubble` with the span in place of the makespan.
    """

    makespan_s: float
    bubble: float
    peak_bytes: tuple[int, ...]
    span_s: float
    span_bubble: float


def step_summary(
    schedule: Schedule, costs: Sequence[StageCost] | Plan, cluster: Cluster | None = None
) -> StepSummary:
    """The same numbers as `simulate` has, in a part of its time; arguments and errors are its own."""
    if isinstance(costs, Plan):
        cluster = costs.cluster if cluster is None else cluster
        costs = stage_costs(costs)
    with no_garbage_collection():
        times = step_times(schedule, costs, cluster)
    makespan_s, span_s = times.makespan_s, max(times.rank_span_s, default=0.0)
    return StepSummary(
        makespan_s=makespan_s,
        bubble=bubble_of(times.busy_s, makespan_s),
        peak_bytes=peak_bytes(schedule, costs),
        span_s=span_s,
        span_bubble=bubble_of(times.busy_s, span_s),
    )
