"""One step as it ran, and as the simulator predicts it, as timelines for a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from partita.planning import Action, Plan, schedule_of, simulate
from partita.reporting import Timeline, action_span, simulation_timeline

__all__ = ["measured_timeline", "simulated_timeline"]


def simulated_timeline(plan: Plan) -> Timeline:
    """Build the timeline of a simulated step of the plan."""
    return simulation_timeline(simulate(schedule_of(plan), plan))


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
            action_span(event["rank"], Action.parse(event["name"]), start - origin, event["end_s"] - origin)
        )
    return Timeline.from_spans("Measured", spans)
