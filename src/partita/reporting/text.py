"""A timeline as plain text, one line a rank, for terminals and logs.

::

    Simulated  12.0 ms, bubble 25.0 %
    rank 0  F0--F1--........B0------F2--B1------....B2------
    rank 1  ....F0--B0------F1--B1------F2--B2------........
            0                                        12.0 ms
"""

from __future__ import annotations

from partita.errors import ReportError
from partita.reporting.data import Timeline, TimelineSpan
from partita.reporting.units import format_seconds, format_share

__all__ = ["timeline_text"]

_IDLE, _COMM, _MORE = ".", "~", "-"
_NARROWEST = 20


def timeline_text(timeline: Timeline, width: int = 100) -> str:
    """Write the timeline in lines of at most `width` characters, without a newline at the end.

    A block starts with its kind and microbatch (``F3``) where that fits, with its kind alone where it does
    not, and goes on with ``-``. A dot is waiting, ``~`` is communication that no computation covers.

    Raises:
        ReportError: `width` is below 20.
    """
    if width < _NARROWEST:
        raise ReportError(f"width is {width}; a timeline needs {_NARROWEST} characters or more.")
    heading = (
        f"{timeline.title}  {format_seconds(timeline.makespan_s)}, bubble {format_share(timeline.bubble)}"
    )
    if not timeline.ranks:
        return _cut(heading, width) + "\n" + _cut("no spans were recorded", width)
    labels = {rank: f"rank {rank}" for rank in timeline.ranks}
    margin = max(len(label) for label in labels.values()) + 2
    columns = width - margin
    lines = [_cut(heading, width)]
    for rank, label in labels.items():
        spans = [span for span in timeline.spans if span.rank == rank]
        lines.append(label.ljust(margin) + _lane(spans, timeline.end_s, columns))
    end = format_seconds(timeline.end_s)
    lines.append(_cut(" " * margin + "0" + end.rjust(columns - 1), width))
    return "\n".join(lines)


def _lane(spans: list[TimelineSpan], end_s: float, columns: int) -> str:
    cells = [_IDLE] * columns
    # Communication first: computation that runs at the same time is written over it.
    for span in sorted(spans, key=lambda span: (span.is_compute, span.start_s)):
        if span.kind == "idle" or end_s == 0:
            continue
        begin = min(columns - 1, round(span.start_s / end_s * columns))
        stop = max(begin + 1, round(span.end_s / end_s * columns))
        cells[begin:stop] = _block(span, stop - begin)
    return "".join(cells[:columns])


def _block(span: TimelineSpan, length: int) -> str:
    if span.kind == "comm":
        return _COMM * length
    full = span.kind if span.microbatch is None else f"{span.kind}{span.microbatch}"
    label = full if len(full) <= length else span.kind[:1]
    return label.ljust(length, _MORE)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
