"""One step as it ran and as the simulator foretold it, in the form that reports draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from partita.planning import Action, Plan, Simulation, get_schedule, simulate
from partita.reporting import Timeline, TimelineSpan

__all__ = ["measured_timeline", "simulated_timeline"]


def simulated_timeline(plan: Plan) -> tuple[Timeline, Simulation]:
    """The step that the plan's costs foretell."""
    schedule = get_schedule(plan.schedule)(len(plan.stages), plan.microbatches, plan.ranks)
    result = simulate(schedule, plan)
    spans = tuple(_span(span.rank, span.action, span.start_s, span.end_s) for span in result.spans)
    return Timeline("Simulated", spans, result.makespan_s, result.bubble), result


def measured_timeline(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """The step that was traced. The time in which an action waits for its message does not count as
    computing.
    """
    events = list(events)
    waited = {
        (event["rank"], event["name"].removeprefix("wait ")): event["end_s"]
        for event in events
        if event["category"] == "wait"
    }
    origin = min(event["start_s"] for event in events)
    spans = []
    for event in events:
        if event["category"] != "compute":
            continue
        start = waited.get((event["rank"], event["name"]), event["start_s"])
        spans.append(
            _span(event["rank"], Action.parse(event["name"]), start - origin, event["end_s"] - origin)
        )
    return Timeline.from_spans("Measured", spans)


def _span(rank: int, action: Action, start_s: float, end_s: float) -> TimelineSpan:
    return TimelineSpan(rank, str(action), action.kind.value, action.stage, action.microbatch, start_s, end_s)
