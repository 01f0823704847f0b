"""The axis below a drawing whose abscissa is time: ticks in milliseconds."""

from __future__ import annotations

from partita.reporting.drawing.scales import Scale, format_tick, ticks
from partita.reporting.drawing.svg import element, text

__all__ = ["AXIS_HEIGHT", "time_axis"]

AXIS_HEIGHT = 22.0
"""Pixels that it takes below its line."""


def time_axis(scale: Scale, y: float) -> str:
    """Draw a line at ``y``, as long as ``scale`` (from seconds to pixels), with about ten ticks."""
    places = ticks(scale.low * 1e3, scale.high * 1e3, 10)
    step = places[1] - places[0]
    parts = [element("line", {"class": "axis", "x1": scale.start, "x2": scale.end, "y1": y, "y2": y})]
    for place in places:
        x = scale(place / 1e3)
        parts.append(element("line", {"class": "axis", "x1": x, "x2": x, "y1": y, "y2": y + 4}))
        parts.append(text(format_tick(place, step), x, y + 17, {"class": "tick", "text-anchor": "middle"}))
    parts.append(text("ms", scale.start - 10, y + 17, {"class": "tick", "text-anchor": "end"}))
    return "".join(parts)
