"""A timeline for terminals and logs, one line a rank, as plain text or in colours.

::

    Simulated  12.0 ms, bubble 25.0 %
    rank 0  F0--F1--........B0------F2--B1------....B2------
    rank 1  ....F0--B0------F1--B1------F2--B2------........
            0                                        12.0 ms
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.style import Style
from rich.text import Text

from partita.errors import ReportError
from partita.reporting.drawing.palette import KINDS, hexadecimal, ink_on, kind_style, shade
from partita.reporting.drawing.units import format_seconds, format_share
from partita.reporting.step.data import Timeline, TimelineSpan

__all__ = ["timeline_drawing", "timeline_text"]

_IDLE, _COMM, _MORE = ".", "~", "-"
_NARROWEST = 20
_LEAST_OF_A_CELL = 0.5 - 1e-9
"""A character stands for what took at least half of its time."""

_Cell = tuple[str, TimelineSpan | None]


def timeline_text(timeline: Timeline, width: int = 100) -> str:
    """Write the timeline in lines of at most `width` characters, without a newline at the end.

    A block starts with its kind and microbatch (``F3``) where that fits, with its kind alone where it does
    not, and goes on with ``-``. A dot is waiting, ``~`` is communication that no computation covers. A
    character in which several blocks lie shows the one that takes most of it.

    Raises:
        ReportError: `width` is below 20.
    """
    return timeline_drawing(timeline, width, legend=False).plain


def timeline_drawing(
    timeline: Timeline, width: int = 100, *, legend: bool = True, most_lanes: int | None = None
) -> Text:
    """Draw `timeline_text` in the colours of the page; a rank's second and later stages are paler.

    Args:
        timeline: what to draw.
        width: how many characters a line has at most.
        legend: whether lines at the end say what the letters stand for.
        most_lanes: draw at most so many ranks, evenly chosen, and say so; all of them where it is None.

    Raises:
        ReportError: `width` is below 20.
    """
    if width < _NARROWEST:
        raise ReportError(f"width is {width}; a timeline needs {_NARROWEST} characters or more.")
    length, bubble = format_seconds(timeline.makespan_s), format_share(timeline.bubble)
    lines = [Text(_cut(f"{timeline.title}  {length}, bubble {bubble}", width), "bold")]
    if not timeline.ranks:
        return Text("\n").join([*lines, Text(_cut("no spans were recorded", width))])
    ranks = _evenly(timeline.ranks, most_lanes)
    margin = max(len(f"rank {rank}") for rank in ranks) + 2
    columns = width - margin
    by_rank: dict[int, list[TimelineSpan]] = {rank: [] for rank in timeline.ranks}
    for span in timeline.spans:
        by_rank[span.rank].append(span)
    for rank in ranks:
        lane = _painted(_lane(by_rank[rank], timeline.end_s, columns), _chunks(by_rank[rank]))
        lines.append(Text(f"rank {rank}".ljust(margin), "dim").append_text(lane))
    end = format_seconds(timeline.end_s)
    lines.append(Text(_cut(" " * margin + "0" + end.rjust(columns - 1), width), "dim"))
    if len(ranks) < len(timeline.ranks):
        lines.append(Text(_cut(f"{len(ranks)} of {len(timeline.ranks)} ranks are shown", width), "dim"))
    if legend:
        lines += _legend(timeline, width)
    return Text("\n").join(lines)


def _evenly(ranks: tuple[int, ...], most: int | None) -> tuple[int, ...]:
    """At most `most` of the ranks, the first and the last among them."""
    if most is None or len(ranks) <= most:
        return ranks
    last = len(ranks) - 1
    return tuple(dict.fromkeys(ranks[round(place * last / max(1, most - 1))] for place in range(most)))


def _chunks(spans: Sequence[TimelineSpan]) -> dict[int | None, int]:
    """For each stage of a rank, its place among them."""
    stages = sorted({span.stage for span in spans if span.stage is not None and span.stage >= 0})
    return {stage: place for place, stage in enumerate(stages)}


def _lane(spans: Sequence[TimelineSpan], end_s: float, columns: int) -> list[_Cell]:
    """The characters of one rank, each with the span that it shows."""
    if end_s == 0:
        return [(_IDLE, None)] * columns
    compute, comm = _owners(spans, end_s, columns, True), _owners(spans, end_s, columns, False)
    # Computation that runs at the same time covers communication.
    owners = [over or below for over, below in zip(compute, comm, strict=True)]
    cells: list[_Cell] = []
    while len(cells) < columns:
        span, start = owners[len(cells)], len(cells)
        stop = next((place for place in range(start, columns) if owners[place] is not span), columns)
        block = _IDLE * (stop - start) if span is None else _block(span, stop - start)
        cells += [(letter, span) for letter in block]
    return cells


def _owners(
    spans: Sequence[TimelineSpan], end_s: float, columns: int, is_compute: bool
) -> list[TimelineSpan | None]:
    """For each character the span that takes most of its time; None where it is mostly empty."""
    owners: list[TimelineSpan | None] = [None] * columns
    largest, covered = [0.0] * columns, [0.0] * columns
    for span in spans:
        if span.kind == "idle" or span.is_compute is not is_compute:
            continue
        for column, part in _parts(span.start_s / end_s * columns, span.end_s / end_s * columns, columns):
            covered[column] += part
            if part > largest[column] + 1e-9:
                largest[column], owners[column] = part, span
    return [owner if part >= _LEAST_OF_A_CELL else None for owner, part in zip(owners, covered, strict=True)]


def _parts(begin: float, end: float, columns: int) -> Iterator[tuple[int, float]]:
    """The columns from `begin` to `end`, and how much of each is covered."""
    for column in range(min(columns - 1, int(begin)), min(columns, int(end) + 1)):
        part = min(end, column + 1) - max(begin, column)
        if part > 0:
            yield column, part


def _block(span: TimelineSpan, length: int) -> str:
    if not span.is_compute:
        return _COMM * length
    full = span.kind if span.microbatch is None else f"{span.kind}{span.microbatch}"
    label = full if len(full) <= length else span.kind[:1]
    return label.ljust(length, _MORE)


def _painted(cells: Sequence[_Cell], chunks: dict[int | None, int]) -> Text:
    """The cells as text; neighbours of one look are put together."""
    lane, run, style = Text(), "", ""
    for letter, span in cells:
        look = "dim" if span is None else _look(span.kind, chunks.get(span.stage, 0) > 0)
        if look != style and run:
            lane.append(run, style)
            run = ""
        run, style = run + letter, look
    return lane.append(run, style)


def _look(kind: str, pale: bool) -> str:
    colour = shade(kind_style(kind).colour, 1.0 if pale else 0.0)
    return str(Style(color=hexadecimal(ink_on(colour)), bgcolor=hexadecimal(colour)))


def _legend(timeline: Timeline, width: int) -> list[Text]:
    """What the letters stand for, in as few lines as hold it."""
    kinds = {span.kind for span in timeline.spans} - {"idle"}
    entries = []
    for kind in [kind for kind in KINDS if kind in kinds] + sorted(kinds - set(KINDS)):
        letter = _COMM if kind == "comm" else kind[:1]
        entries.append((letter, _look(kind, pale=False), kind_style(kind).name))
    if any(span.microbatch is not None for span in timeline.spans):
        entries.append(("0", "dim", "microbatch"))
    if any(span.is_compute for span in timeline.spans):
        entries.append((_MORE, "dim", "goes on"))
    entries.append((_IDLE, "dim", "waiting"))
    lines = [Text()]
    for letter, style, name in entries:
        entry = Text().append(letter, style).append(f" {_cut(name, width - 2)}")
        if lines[-1] and len(lines[-1]) + 2 + len(entry) > width:
            lines.append(Text())
        lines[-1].append("  " if lines[-1] else "").append_text(entry)
    return lines


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
