"""What the ranks hold over a step as an SVG chart, a lane for each:

rank 0   ▁▂▄▆▆▆▄▂▁   71.3 GiB
rank 1   ▁▁▂▄▄▄▂▁▁   60.1 GiB
axis     0        50       100      150 ms
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.reporting.drawing.scales import Scale
from partita.reporting.drawing.svg import Attribute, element, picture, points, text, title
from partita.reporting.drawing.time_axis import AXIS_HEIGHT, time_axis
from partita.reporting.plan.candidates import MemoryUnit, format_memory
from partita.reporting.plan.plan_report import MemoryLane

__all__ = ["memory_chart"]

_LEFT, _RIGHT, _TOP, _AMOUNT = 62.0, 18.0, 10.0, 118.0
_FONT = 12.0
_PIXEL = 0.5


def memory_chart(
    lanes: Sequence[MemoryLane], end_s: float, unit: MemoryUnit = "bytes", *, width: float = 1040
) -> str:
    """Draw the lanes as one ``<svg>``, `width` pixels wide at its natural size.

    All lanes have one scale, from nothing to the largest amount or limit. The number beside a lane is its
    peak.
    """
    largest = max((max(lane.peak, lane.limit or 0.0) for lane in lanes), default=0.0)
    scale = Scale(0.0, max(end_s, 1e-9), _LEFT, width - _RIGHT - _AMOUNT)
    height = min(56.0, max(15.0, 480.0 / max(1, len(lanes))))
    pitch = height + max(3.0, height * 0.2)
    bottom = _TOP + max(1, len(lanes)) * pitch
    parts = [
        _lane(lane, scale, _TOP + place * pitch, height, max(largest, 1e-9), unit)
        for place, lane in enumerate(lanes)
    ]
    parts.append(time_axis(scale, bottom))
    return picture(width, bottom + AXIS_HEIGHT, _description(lanes, unit), parts, "chart gantt memory")


def _lane(lane: MemoryLane, scale: Scale, y: float, height: float, largest: float, unit: MemoryUnit) -> str:
    size = min(_FONT, height)
    middle = y + height / 2 + size * 0.35
    anchor: dict[str, Attribute] = {"class": "quiet", "text-anchor": "end", "font-size": size}
    amounts = Scale(0.0, largest, y + height, y)
    over = lane.limit is not None and lane.peak > lane.limit
    ground = {"x": scale.start, "y": y, "width": scale.end - scale.start, "height": height, "rx": 3.0}
    shape = "held over" if over else "held"
    peak = format_memory(lane.peak, unit)
    number: dict[str, Attribute] = {"class": "over" if over else "quiet", "font-size": size}
    parts = [
        text(f"rank {lane.rank}", scale.start - 10, middle, anchor),
        element("rect", {"class": "lane", **ground}),
        element("polygon", {"class": shape, "points": points(_outline(lane, scale, amounts))}),
        text(peak, scale.end + 10, middle, number),
    ]
    if lane.limit is not None:
        at = amounts(lane.limit)
        ends = {"x1": scale.start, "x2": scale.end, "y1": at, "y2": at}
        parts.append(element("line", {"class": "limit", **ends}))
    return element("g", None, title(_tooltip(lane, peak, unit)), *parts)


def _outline(lane: MemoryLane, scale: Scale, amounts: Scale) -> list[tuple[float, float]]:
    """The corners of the steps; of those on one pixel, the highest and the last are drawn."""
    corners = [(scale.start, amounts.start)]
    pixel = scale.start
    highest = last = amounts(lane.steps[0][1])
    for time_s, amount in (*lane.steps[1:], (scale.high, 0.0)):
        x, y = min(scale(time_s), scale.end), amounts(amount)
        if x - pixel >= _PIXEL or time_s == scale.high:
            end = min(pixel + _PIXEL, x)
            corners += [(pixel, highest), (end, highest), (end, last), (x, last)]
            pixel, highest = x, y
        highest, last = min(highest, y), y
    return [*corners, (scale.end, amounts.start)]


def _tooltip(lane: MemoryLane, peak: str, unit: MemoryUnit) -> str:
    start = format_memory(lane.steps[0][1], unit)
    limit = "" if lane.limit is None else f"\nlimit {format_memory(lane.limit, unit)}"
    return f"rank {lane.rank}: at most {peak}\n{start} all the time{limit}"


def _description(lanes: Sequence[MemoryLane], unit: MemoryUnit) -> str:
    peak = format_memory(max((lane.peak for lane in lanes), default=0.0), unit)
    return f"Memory over one step of {len(lanes)} ranks; at most {peak} on one."
