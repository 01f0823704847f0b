"""One step as it ran, and as the simulator predicts it, as timelines for a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from partita.planning import Action, Plan, get_schedule, simulate
from partita.reporting import Timeline, TimelineSpan

__all__ = ["measured_timeline", "simulated_timeline"]


def simulated_timeline(plan: Plan) -> Timeline:
    """Build the timeline of a simulated step of the plan."""
    schedule = get_schedule(plan.schedule)(len(plan.stages), plan.microbatches, plan.ranks)
    result = simulate(schedule, plan)
    spans = tuple(_span(span.rank, span.action, span.start_s, span.end_s) for span in result.spans)
    return Timeline("Simulated", spans, result.makespan_s, result.bubble)


def measured_timeline(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """Build the timeline of a traced step; while an action waits for its message, it does not compute."""
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
