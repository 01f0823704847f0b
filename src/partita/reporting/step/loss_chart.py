"""Both sides' losses as an SVG chart, and their difference below it.

The curves are expected to coincide, and a curve drawn over another hides it. So the uncut model's is a wide
pale band and the pipelined one a thin dark line on top: both are seen, whether they agree or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from partita.reporting.drawing.scales import Scale, format_tick, ticks
from partita.reporting.drawing.svg import element, picture, points, text, title
from partita.reporting.drawing.units import format_loss, format_number
from partita.reporting.step.data import LossPoint

__all__ = ["difference_summary", "loss_chart", "thin_out"]

_LEFT, _RIGHT, _TOP = 66.0, 18.0, 26.0
_STRIP, _STRIP_GAP, _AXIS = 48.0, 42.0, 18.0
_MOST_POINTS = 1500  # more than that can't be told apart on a screen
_MOST_TOOLTIPS = 400
_TOO_LARGE = 1e100  # a loss beyond that is marked, not drawn: it would press all others flat


def loss_chart(
    losses: Sequence[LossPoint],
    validation: Sequence[LossPoint] = (),
    *,
    width: float = 1040,
    height: float = 240,
) -> str:
    """Draw the curves, `height` pixels high, and a strip of differences, as one ``<svg>`` of `width` pixels.

    A loss that is not finite (or above 1e100) breaks the curve and is marked by a cross at the top edge.
    Validation losses are rings.
    """
    shown = thin_out(losses, _MOST_POINTS)
    steps = [point.step for point in (*shown, *validation)]
    across = Scale(float(min(steps, default=0)), float(max(steps, default=0)), _LEFT, width - _RIGHT)
    curves_bottom = _TOP + height
    strip_top = curves_bottom + _STRIP_GAP
    bottom = strip_top + _STRIP
    parts = [
        _curves(shown, validation, across, curves_bottom),
        _differences(shown, across, strip_top),
        _step_axis(across, bottom + 8, width),
    ]
    if len(shown) <= _MOST_TOOLTIPS:
        parts.extend(_tooltips(shown, across, bottom, width))
    return picture(width, bottom + 8 + _AXIS, _description(losses), parts, "chart losses")


def difference_summary(losses: Sequence[LossPoint]) -> str:
    """Say in one line whether the curves coincide.

    >>> difference_summary([LossPoint(0, 2.0, 2.0), LossPoint(1, 1.5, 1.25)])
    'up to 0.250, at 1 of 2 steps'
    """
    if not losses:
        return "no losses were recorded"
    apart = [point.difference for point in losses if point.difference != 0]
    if not apart:
        return f"0.0 at all {len(losses)} steps" if len(losses) > 1 else "0.0 at the only step"
    steps = f"{len(apart)} of {len(losses)} steps" if len(losses) > 1 else "the only step"
    finite = [abs(difference) for difference in apart if math.isfinite(difference)]
    if len(finite) < len(apart):
        return f"not 0.0 at {steps}, and one side is not a finite number at {_many(len(apart) - len(finite))}"
    return f"up to {format_number(max(finite))}, at {steps}"


def _many(steps: int) -> str:
    return f"{steps} of them" if steps > 1 else "one of them"


def thin_out(losses: Sequence[LossPoint], limit: int) -> tuple[LossPoint, ...]:
    """Choose about `limit` points: of each stretch the ends, the extremes and the greatest difference.

    What a reader looks for in a long run (a spike, a step where the two sides part) is among them.
    """
    if len(losses) <= limit:
        return tuple(losses)
    stretch = math.ceil(len(losses) * 4 / limit)
    kept: list[LossPoint] = []
    for begin in range(0, len(losses), stretch):
        part = range(begin, min(begin + stretch, len(losses)))
        chosen = {
            part[0],
            min(part, key=lambda index: _or(losses[index].pipelined, math.inf)),
            max(part, key=lambda index: _or(losses[index].pipelined, math.inf)),
            max(part, key=lambda index: _or(abs(losses[index].difference), math.inf)),
        }
        kept.extend(losses[index] for index in sorted(chosen))
    if kept[-1] is not losses[-1]:
        kept.append(losses[-1])
    return tuple(kept)


def _or(value: float, instead: float) -> float:
    return instead if math.isnan(value) else value


def _drawable(value: float) -> bool:
    return abs(value) < _TOO_LARGE  # False for NaN, too


def _curves(shown: Sequence[LossPoint], validation: Sequence[LossPoint], across: Scale, bottom: float) -> str:
    both = [value for point in (*shown, *validation) for value in (point.pipelined, point.reference)]
    drawn = [value for value in both if _drawable(value)]
    low, high = (min(drawn), max(drawn)) if drawn else (0.0, 1.0)
    flat = high - low <= 1e-6 * max(abs(low), abs(high), 1e-3)
    margin = max(abs(high) * 0.1, 0.1) if flat else (high - low) * 0.06
    down = Scale(low - margin, high + margin, bottom, _TOP)
    places = ticks(down.low, down.high, 8)
    step = places[1] - places[0] if len(places) > 1 else 0.0
    parts = [text("loss", _LEFT, _TOP - 10, {"class": "tick"})]
    for place in places:
        y = down(place)
        parts.append(
            element("line", {"class": "grid", "x1": across.start, "x2": across.end, "y1": y, "y2": y})
        )
        parts.append(
            text(format_tick(place, step), _LEFT - 10, y + 4, {"class": "tick", "text-anchor": "end"})
        )
    for name, value in _SIDES:
        parts.extend(_line(name, shown, value, across, down))
    parts.extend(_rings(validation, across, down))
    parts.extend(_crosses(shown, across))
    return "".join(parts)


_SIDES: tuple[tuple[str, Callable[[LossPoint], float]], ...] = (
    ("reference", lambda point: point.reference),
    ("pipelined", lambda point: point.pipelined),
)


def _line(
    name: str, shown: Sequence[LossPoint], value: Callable[[LossPoint], float], across: Scale, down: Scale
) -> Iterable[str]:
    for run in _runs(shown, value):
        places = [(across(point.step), down(value(point))) for point in run]
        if len(places) == 1:
            x, y = places[0]
            yield element("circle", {"class": f"dot {name}", "cx": x, "cy": y, "r": _DOT[name]})
        else:
            yield element("polyline", {"class": f"curve {name}", "points": points(places)})


_DOT = {"reference": 6.0, "pipelined": 2.5}


def _runs(shown: Sequence[LossPoint], value: Callable[[LossPoint], float]) -> Iterable[list[LossPoint]]:
    run: list[LossPoint] = []
    for point in shown:
        if _drawable(value(point)):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _rings(validation: Sequence[LossPoint], across: Scale, down: Scale) -> Iterable[str]:
    for point in validation:
        words = title(f"validation after step {point.step}\n{_both(point)}")
        for name, value in _SIDES:
            if _drawable(value(point)):
                place = {"cx": across(point.step), "cy": down(value(point)), "r": 5.0}
                yield element("circle", {"class": f"ring {name}", **place}, words)


def _crosses(shown: Sequence[LossPoint], across: Scale) -> Iterable[str]:
    for point in shown:
        if not (_drawable(point.pipelined) and _drawable(point.reference)):
            yield _cross(across(point.step), _TOP)


def _cross(x: float, y: float) -> str:
    arms = f"M{x - 4:.2f} {y - 4:.2f}l8 8m0 -8l-8 8"
    return element("path", {"class": "cross", "d": arms})


def _differences(shown: Sequence[LossPoint], across: Scale, top: float) -> str:
    most = max((abs(point.difference) for point in shown if _drawable(point.difference)), default=0.0)
    down = Scale(-most, most, top + _STRIP, top)
    middle = top + _STRIP / 2
    size = {"width": across.end - across.start, "height": _STRIP}
    parts = [
        text("difference (pipelined - uncut)", _LEFT, top - 10, {"class": "tick"}),
        element("rect", {"class": "lane", "x": across.start, "y": top, "rx": 3.0, **size}),
        element("line", {"class": "zero", "x1": across.start, "x2": across.end, "y1": middle, "y2": middle}),
        text("0", _LEFT - 10, middle + 4, {"class": "tick", "text-anchor": "end"}),
    ]
    if most:
        for y, sign in ((top + 9, "+"), (top + _STRIP - 1, "-")):
            parts.append(text(f"{sign}{most:.0e}", _LEFT - 10, y, {"class": "tick", "text-anchor": "end"}))
    for point in shown:
        x = across(point.step)
        if not _drawable(point.difference):
            parts.append(_cross(x, middle))
        elif point.difference:
            ends = {"x1": x, "x2": x, "y1": middle, "y2": down(point.difference)}
            parts.append(element("line", {"class": "stem", **ends}))
    return "".join(parts)


def _step_axis(across: Scale, y: float, width: float) -> str:
    # Steps are whole numbers, so are their ticks.
    about = max(1, min(12 if width > 700 else 6, int(across.high - across.low)))
    places = [place for place in ticks(across.low, across.high, about) if place == int(place)]
    parts = []
    for place in places:
        x = across(place)
        parts.append(element("line", {"class": "axis", "x1": x, "x2": x, "y1": y - 8, "y2": y - 3}))
        parts.append(text(format_tick(place, 1.0), x, y + 11, {"class": "tick", "text-anchor": "middle"}))
    parts.append(text("step", _LEFT - 10, y + 11, {"class": "tick", "text-anchor": "end"}))
    return "".join(parts)


def _tooltips(shown: Sequence[LossPoint], across: Scale, bottom: float, width: float) -> Iterable[str]:
    """An invisible column for each step that shows its numbers while the pointer rests on it."""
    places = [across(point.step) for point in shown]
    edges = [_LEFT, *((left + right) / 2 for left, right in pairwise(places)), width - _RIGHT]
    for point, (left, right) in zip(shown, pairwise(edges), strict=False):  # no point has two edges
        box = {"x": left, "y": _TOP, "width": right - left, "height": bottom - _TOP}
        words = title(f"step {point.step}\n{_both(point)}")
        yield element("rect", {"class": "column", **box}, words)


def _both(point: LossPoint) -> str:
    return (
        f"pipelined {format_loss(point.pipelined)}\nuncut {format_loss(point.reference)}\n"
        f"difference {format_number(point.difference)}"
    )


def _description(losses: Sequence[LossPoint]) -> str:
    if not losses:
        return "Loss curves: no losses were recorded."
    first, last = losses[0], losses[-1]
    return (
        f"Loss curves of the pipelined and the uncut model, steps {first.step} to {last.step}: "
        f"from {format_loss(first.pipelined)} to {format_loss(last.pipelined)}; "
        f"difference {difference_summary(losses)}."
    )
