"""Timelines as an SVG Gantt chart: one below the other, on one time scale, a lane for each rank.

heading     Measured · step of 183 ms · bubble 21.4 %
rank 0      ████ ████ ████      ████████ ████      <- computation
            ▂▂         ▂▂                          <- communication, which may overlap it
rank 1      ...
heading     Simulated ...
axis        0        50       100      150 ms
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from partita.reporting.drawing.palette import BLACK, hexadecimal, ink_on, kind_style, shade
from partita.reporting.drawing.scales import Scale
from partita.reporting.drawing.svg import Attribute, element, picture, standalone, text, title
from partita.reporting.drawing.time_axis import AXIS_HEIGHT, time_axis
from partita.reporting.drawing.units import format_seconds, format_share
from partita.reporting.step.data import Timeline, TimelineSpan

__all__ = ["gantt_chart", "timeline_svg"]

_LEFT, _RIGHT = 62.0, 18.0
_HEADING, _PANEL_GAP = 34.0, 18.0
_DIGIT, _LABEL_ROOM = 6.6, 6.0  # pixels that a digit takes at 11 px, and what surrounds a number
_LONGEST_TITLE = 60


def gantt_chart(timelines: Sequence[Timeline], *, width: float = 1040) -> str:
    """Draw the timelines as one ``<svg>``, `width` pixels wide at its natural size.

    Blocks are coloured by kind and shaded by microbatch, and carry the microbatch's number where it fits.
    Resting the pointer on one shows its label and times. Idle spans are not drawn: the empty lane says it.
    """
    end = max((timeline.end_s for timeline in timelines), default=0.0)
    scale = Scale(0.0, max(end, 1e-9), _LEFT, width - _RIGHT)
    last = max((span.microbatch or 0 for timeline in timelines for span in timeline.spans), default=0)
    comm = any(span.kind == "comm" for timeline in timelines for span in timeline.spans)
    lane = _lane_height(max((len(timeline.ranks) for timeline in timelines), default=1))
    parts: list[str] = []
    y = 0.0
    for timeline in timelines:
        panel = _Panel(timeline, scale, y, lane, last, comm)
        parts.append(panel.draw())
        y = panel.bottom + _PANEL_GAP
    if end:
        parts.append(time_axis(scale, y - _PANEL_GAP))
    return picture(width, y - _PANEL_GAP + AXIS_HEIGHT, _description(timelines), parts, "chart gantt")


def timeline_svg(timelines: Sequence[Timeline], *, width: float = 1040) -> str:
    """Draw the timelines as `gantt_chart` does, as the text of an SVG file of its own."""
    return standalone(gantt_chart(timelines, width=width))


class _Panel:
    """Where one timeline's parts lie, and how they are drawn."""

    def __init__(
        self, timeline: Timeline, scale: Scale, top: float, lane: float, last: int, comm: bool
    ) -> None:
        self.timeline = timeline
        self.scale = scale
        self.top = top
        self.lane = lane
        self.last = last
        self.gap = max(2.0, lane * 0.2)
        # Communication runs beside computation, so it gets a strip of its own at the lane's foot.
        self.strip = max(3.0, lane * 0.2) if comm else 0.0
        self.lanes = {rank: index for index, rank in enumerate(timeline.ranks)}
        self.bottom = top + _HEADING + max(1, len(self.lanes)) * (lane + self.gap)

    def draw(self) -> str:
        spans = [span for span in self.timeline.spans if span.kind != "idle"]
        note = text("No spans were recorded.", _LEFT, self._y(0) + 14, {"class": "quiet"})
        return element(
            "g",
            None,
            self._heading(),
            *(self._lane(rank) for rank in self.lanes),
            *(self._block(span) for span in spans),
            self._finish(),
            *([] if self.lanes else [note]),
        )

    def _y(self, index: int) -> float:
        return self.top + _HEADING + index * (self.lane + self.gap)

    def _heading(self) -> str:
        length, bubble = format_seconds(self.timeline.makespan_s), format_share(self.timeline.bubble)
        facts = f"step of {length} · bubble {bubble}"
        name = element("tspan", {"class": "strong"}, escape(_shortened(self.timeline.title)))
        rest = element("tspan", {"class": "quiet", "dx": 10.0}, escape(facts))
        return element("text", {"x": _LEFT, "y": self.top + _HEADING - 12, "class": "heading"}, name, rest)

    def _lane(self, rank: int) -> str:
        y = self._y(self.lanes[rank])
        font_size = min(12.0, self.lane)
        size = {"width": self.scale.end - _LEFT, "height": self.lane}
        ground = element("rect", {"class": "lane", "x": _LEFT, "y": y, "rx": 3.0, **size})
        anchor: dict[str, Attribute] = {"class": "quiet", "text-anchor": "end", "font-size": font_size}
        return ground + text(f"rank {rank}", _LEFT - 10, y + self.lane / 2 + font_size * 0.35, anchor)

    def _block(self, span: TimelineSpan) -> str:
        colour = shade(kind_style(span.kind).colour, (span.microbatch or 0) / max(1, self.last))
        x, right = self.scale(span.start_s), self.scale(span.end_s)
        # A span too short to see is drawn half a pixel wide; a wider one gives way a little to its neighbour.
        drawn = max(0.5, right - x - (0.8 if right - x > 4 else 0.0))
        y = self._y(self.lanes[span.rank])
        height = self.lane - self.strip
        if span.kind == "comm":
            y, height = y + height + 1, self.strip - 1
        block = element(
            "rect",
            {
                "x": x,
                "y": y,
                "width": drawn,
                "height": height,
                "rx": 2.0 if drawn > 6 and span.kind != "comm" else None,
                "fill": hexadecimal(colour),
            },
            title(_tooltip(span)),
        )
        number = "" if span.microbatch is None else str(span.microbatch)
        roomy = number and drawn >= _DIGIT * len(number) + _LABEL_ROOM and height >= 11
        if span.kind == "comm" or not roomy:
            return block
        ink = "black" if ink_on(colour) == BLACK else "white"
        return block + text(number, x + drawn / 2, y + height / 2 + 4, {"class": f"number {ink}"})

    def _finish(self) -> str:
        if not self.timeline.makespan_s:
            return ""
        x = self.scale(self.timeline.makespan_s)
        ends = {"x1": x, "x2": x, "y1": self._y(0) - 5, "y2": self.bottom - self.gap + 5}
        return element("line", {"class": "finish", **ends}, title("end of the step"))


def _lane_height(ranks: int) -> float:
    """Roomy lanes for a few ranks; for many, just enough to read the rank's label."""
    return min(34.0, max(11.0, 400.0 / max(1, ranks)))


def _tooltip(span: TimelineSpan) -> str:
    times = f"{span.start_s * 1e3:.2f} to {span.end_s * 1e3:.2f} ms, takes {format_seconds(span.duration_s)}"
    return f"{span.words} ({span.label})\nrank {span.rank}, {kind_style(span.kind).name}\n{times}"


def _description(timelines: Sequence[Timeline]) -> str:
    each = (
        f"{timeline.title}: {len(timeline.ranks)} ranks, {format_seconds(timeline.makespan_s)}, "
        f"bubble {format_share(timeline.bubble)}"
        for timeline in timelines
    )
    return "Timeline of one step. " + "; ".join(each) + "."


def _shortened(words: str) -> str:
    return words if len(words) <= _LONGEST_TITLE else words[: _LONGEST_TITLE - 1] + "…"
