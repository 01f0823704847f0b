"""A step as it was traced, as a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from partita.errors import ReportError
from partita.planning import Action
from partita.reporting.step.data import Timeline, TimelineSpan
from partita.reporting.step.simulated import action_span

if TYPE_CHECKING:
    from partita.runtime import TraceEvent

__all__ = ["measured_timeline"]

_WAIT = "wait "


def measured_timeline(events: Iterable[TraceEvent], title: str = "Measured") -> Timeline:
    """Return what each rank did in a step that a `partita.runtime.Tracer` has recorded.

    Passes are without what they waited for, which is ``idle``; what a rank spends on starting sends and
    receives is ``handling``. A message is drawn at the rank that sends it, from then until the receiver,
    where it waits for it, goes on; where it does not wait, nobody knows when it arrived, and it is left out.

    Args:
        events: of all ranks and of one step, on one clock, as `partita.runtime.gather` gives them.
        title: of the timeline.

    Raises:
        ReportError: there are no events.

    >>> from partita.runtime import TraceEvent
    >>> timeline = measured_timeline([TraceEvent("0F0", "compute", 0, 7.0, 9.0)])
    >>> timeline.makespan_s, timeline.spans[0].words
    (2.0, 'stage 0 forward, microbatch 0')
    """
    events = sorted(events, key=lambda event: (event.start_s, -event.end_s))
    if not events:
        raise ReportError("no events were recorded: give the schedule a Tracer before the step")
    origin = events[0].start_s
    waits = {
        (event.rank, event.name.removeprefix(_WAIT)): event for event in events if event.category == "wait"
    }
    return Timeline.from_spans(title, [*_own_spans(events, waits, origin), *_messages(events, waits, origin)])


def _own_spans(
    events: Sequence[TraceEvent], waits: dict[tuple[int, str], TraceEvent], origin: float
) -> Iterator[TimelineSpan]:
    """What keeps a rank's own thread busy, or lets it wait."""
    for event in events:
        start, end, rank = event.start_s - origin, event.end_s - origin, event.rank
        if event.category == "wait":
            action = Action.parse(event.name.removeprefix(_WAIT))
            yield TimelineSpan(rank, event.name, "idle", action.stage, action.microbatch, start, end)
        elif event.category == "compute":
            wait = waits.get((rank, event.name))
            begin = start if wait is None else min(end, wait.end_s - origin)
            yield action_span(rank, Action.parse(event.name), begin, end)
        else:
            action = Action.parse(event.name)
            yield TimelineSpan(rank, event.name, "handling", action.stage, action.microbatch, start, end)


def _messages(
    events: Sequence[TraceEvent], waits: dict[tuple[int, str], TraceEvent], origin: float
) -> Iterator[TimelineSpan]:
    """The messages whose arrival was waited for."""
    arrivals: dict[tuple[str, int, int | None], float] = {
        (action.kind, action.stage, action.microbatch): wait.end_s - origin
        for (_, name), wait in waits.items()
        for action in (Action.parse(name),)
    }
    for event in events:
        if event.category in ("compute", "wait"):
            continue
        action = Action.parse(event.name)
        if not action.is_send:
            continue
        passes = ("F",) if action.kind == "SEND_F" else ("B", "I")
        arrived = [arrivals.get((kind, action.other_stage, action.microbatch)) for kind in passes]
        end = next((at for at in arrived if at is not None), None)
        start = event.start_s - origin
        if end is not None and end > start:
            yield TimelineSpan(event.rank, event.name, "comm", action.stage, action.microbatch, start, end)
