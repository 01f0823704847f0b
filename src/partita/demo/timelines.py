"""One step as it ran, as a timeline for a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from partita.reporting import Timeline, measured_timeline
from partita.runtime import TraceEvent

__all__ = ["traced_timeline"]


def traced_timeline(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """Build the timeline of a traced step from what the ranks have written down."""
    return measured_timeline(
        TraceEvent(event["name"], event["category"], event["rank"], event["start_s"], event["end_s"])
        for event in events
    )
