"""Timelines in the Chrome trace event format, which Perfetto and ``chrome://tracing`` open.

Source: "Trace Event Format" (Duffy and others, Google, 2016). Each timeline is a process and each rank a
thread of it. Events of a thread must nest, and communication overlaps computation, so it gets a thread of
its own below the rank's. Arrows go from a stage's forward to the next stage's, and back for gradients::

    process "Measured"
      rank 0         [0F0][0F1]   [0B0]...
      rank 0 comm       [send]
      rank 1              ↘ [1F0][1B0] ↗
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from partita.reporting.data import Timeline, TimelineSpan
from partita.reporting.palette import kind_style

__all__ = ["chrome_trace"]

_MICROSECONDS = 1e6
_STEP_TO = {"F": 1, "B": -1, "I": -1}  # where a kind's result goes: the next stage, or the one before

_Event = dict[str, Any]


def chrome_trace(timelines: Sequence[Timeline], *, arrows: bool = True) -> str:
    """Write the timelines as one JSON object with ``traceEvents``: metadata first, the rest in order of time.

    Args:
        timelines: each becomes a process, numbered from 0 and named by its title.
        arrows: whether to add flow events between stages on different ranks.

    Times are in microseconds since the step began. Idle spans are left out.
    """
    metadata: list[_Event] = []
    events: list[_Event] = []
    for process, timeline in enumerate(timelines):
        spans = [span for span in timeline.spans if span.kind != "idle"]
        # Ranks keep their own numbers as thread ids; the threads for communication are counted on from there.
        offset = max(timeline.ranks, default=0) + 1
        metadata.extend(_names(process, timeline.title, spans, offset))
        events.extend(_complete(process, span, offset) for span in spans)
        if arrows:
            events.extend(_arrows(process, spans))
    # Where two begin together, the longer goes first: it is the outer one.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return json.dumps({"traceEvents": metadata + events, "displayTimeUnit": "ms"}, allow_nan=False)


def _names(process: int, title: str, spans: Sequence[TimelineSpan], offset: int) -> Iterable[_Event]:
    yield _metadata("process_name", process, 0, {"name": title})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for rank, comm in sorted({(span.rank, span.kind == "comm") for span in spans}):
        thread = rank + offset * comm
        name = f"rank {rank} comm" if comm else f"rank {rank}"
        yield _metadata("thread_name", process, thread, {"name": name})
        yield _metadata("thread_sort_index", process, thread, {"sort_index": 2 * rank + comm})


def _metadata(name: str, process: int, thread: int, arguments: _Event) -> _Event:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _complete(process: int, span: TimelineSpan, offset: int) -> _Event:
    arguments = {"rank": span.rank, "stage": span.stage, "microbatch": span.microbatch}
    return {
        "name": span.label,
        "cat": kind_style(span.kind).name,
        "ph": "X",
        "ts": _microseconds(span.start_s),
        "dur": max(0.0, round(_microseconds(span.end_s) - _microseconds(span.start_s), 3)),
        "pid": process,
        "tid": span.rank + offset * (span.kind == "comm"),
        "args": {name: value for name, value in arguments.items() if value is not None},
    }


def _arrows(process: int, spans: Sequence[TimelineSpan]) -> Iterable[_Event]:
    """Yield a pair of events for each result that goes to a neighbour stage on another rank."""
    by_action = {(span.kind, span.stage, span.microbatch): span for span in spans}
    number = 0
    for (kind, stage, microbatch), source in by_action.items():
        if kind not in _STEP_TO or stage is None or microbatch is None:
            continue
        target = by_action.get((kind, stage + _STEP_TO[kind], microbatch))
        # Clocks of two ranks may disagree a little: an arrow that would go back in time is left out.
        if target is None or target.rank == source.rank or target.start_s < source.start_s:
            continue
        name = "activation" if kind == "F" else "gradient"
        common = {"name": name, "cat": "flow", "id": f"{process}.{number}", "pid": process}
        # An arrow hangs on the slice that encloses its time, and at the very end that may be the next one.
        leaves = max(source.start_s, min(source.end_s, target.start_s) - 1e-9)
        yield {**common, "ph": "s", "tid": source.rank, "ts": _microseconds(leaves)}
        yield {**common, "ph": "f", "bp": "e", "tid": target.rank, "ts": _microseconds(target.start_s)}
        number += 1


def _microseconds(seconds: float) -> float:
    """Return microseconds, rounded to whole nanoseconds."""
    return round(seconds * _MICROSECONDS, 3)
