"""Timelines in the Chrome trace event format, which Perfetto and ``chrome://tracing`` open.

Source: "Trace Event Format" (Duffy and others, Google, 2016). Each timeline is a process and each rank a
thread of it. Events have names for people, such as "stage 1 forward, microbatch 3". Those of a thread must
nest, and communication overlaps computation, so it gets a thread of its own below the rank's, and further
ones where messages overlap. Arrows go from a stage's forward to the next stage's, and back for gradients;
memory is a counter of each rank::

    process "Measured"
      rank 0         [0F0][0F1]   [0B0]...
      rank 0 comm       [send]
      rank 1              ↘ [1F0][1B0] ↗
      rank 0 memory  ▁▁▁▂▂▂▃▃▃▃▃▃▃▁▁▁▁
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from partita.reporting.drawing.palette import kind_style
from partita.reporting.step.data import Timeline, TimelineSpan

__all__ = ["chrome_trace"]

_MICROSECONDS = 1e6
_STEP_TO = {"F": 1, "B": -1, "I": -1}  # where a kind's result goes: the next stage, or the one before

_Event = dict[str, Any]
_Thread = tuple[int, str, list[TimelineSpan]]
"""Its number, its name and what it shows."""


def chrome_trace(
    timelines: Sequence[Timeline],
    *,
    arrows: bool = True,
    memory: Sequence[Mapping[int, Sequence[tuple[float, float]]]] = (),
) -> str:
    """Write the timelines as one JSON object with ``traceEvents``: metadata first, the rest in order of time.

    Args:
        timelines: each becomes a process, numbered from 0 and named by its title.
        arrows: whether to add flow events between stages on different ranks.
        memory: for each timeline (or for the first few), what its ranks hold: pairs (seconds from which on,
            bytes), in order of time, as a `partita.planning.Simulation` gives them.

    Times are in microseconds since the step began. Idle spans are left out.
    """
    metadata: list[_Event] = []
    events: list[_Event] = []
    for process, timeline in enumerate(timelines):
        spans = [span for span in timeline.spans if span.kind != "idle"]
        threads = _threads(spans)
        metadata.extend(_names(process, timeline.title, threads))
        for thread, _, own in threads:
            events.extend(_complete(process, span, thread) for span in own)
        if arrows:
            events.extend(_arrows(process, spans))
    for process, ranks in enumerate(memory):
        for rank, steps in ranks.items():
            events.extend(_counter(process, rank, *step) for step in steps)
    # Where two begin together, the longer goes first: it is the outer one.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return json.dumps({"traceEvents": metadata + events, "displayTimeUnit": "ms"}, allow_nan=False)


def _threads(spans: Sequence[TimelineSpan]) -> list[_Thread]:
    """The threads of a timeline, from top to bottom: each rank's own, then those of its messages, as many as
    overlap.
    """
    computes: defaultdict[int, list[TimelineSpan]] = defaultdict(list)
    messages: defaultdict[int, list[TimelineSpan]] = defaultdict(list)
    for span in spans:
        (messages if span.kind == "comm" else computes)[span.rank].append(span)
    threads: list[_Thread] = []
    # Ranks keep their own numbers; the threads for messages are counted on from there.
    number = max((*computes, *messages), default=0) + 1
    for rank in sorted({*computes, *messages}):
        if rank in computes:
            threads.append((rank, f"rank {rank}", computes[rank]))
        for lane, own in enumerate(_lanes(messages[rank]), 1):
            threads.append((number, f"rank {rank} comm" + (f" {lane}" if lane > 1 else ""), own))
            number += 1
    return threads


def _lanes(spans: Iterable[TimelineSpan]) -> list[list[TimelineSpan]]:
    """The spans in as few rows as there can be without two that overlap in one row."""
    lanes: list[list[TimelineSpan]] = []
    free: list[tuple[float, int]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        if free and free[0][0] <= span.start_s:
            lane = heapq.heappop(free)[1]
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(span)
        heapq.heappush(free, (span.end_s, lane))
    return lanes


def _names(process: int, title: str, threads: Sequence[_Thread]) -> Iterable[_Event]:
    yield _metadata("process_name", process, 0, {"name": title})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for place, (thread, name, _) in enumerate(threads):
        yield _metadata("thread_name", process, thread, {"name": name})
        yield _metadata("thread_sort_index", process, thread, {"sort_index": place})


def _counter(process: int, rank: int, time_s: float, size: float) -> _Event:
    return {
        "name": f"rank {rank} memory",
        "cat": "memory",
        "ph": "C",
        "ts": _microseconds(time_s),
        "pid": process,
        "tid": 0,
        "args": {"bytes": size},
    }


def _metadata(name: str, process: int, thread: int, arguments: _Event) -> _Event:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _complete(process: int, span: TimelineSpan, thread: int) -> _Event:
    arguments = {
        "action": span.label,
        "rank": span.rank,
        "stage": span.stage,
        "microbatch": span.microbatch,
    }
    return {
        "name": span.words,
        "cat": kind_style(span.kind).name,
        "ph": "X",
        "ts": _microseconds(span.start_s),
        "dur": max(0.0, round(_microseconds(span.end_s) - _microseconds(span.start_s), 3)),
        "pid": process,
        "tid": thread,
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
        yield {
            **common,
            "ph": "f",
            "bp": "e",
            "tid": target.rank,
            "ts": _microseconds(target.start_s),
        }
        number += 1


def _microseconds(seconds: float) -> float:
    """Return microseconds, rounded to whole nanoseconds."""
    return round(seconds * _MICROSECONDS, 3)
