"""SVG as text. Elements are strings; whatever a user wrote goes through `escape` on its way in."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["Attribute", "element", "picture", "points", "standalone", "text", "title"]

Attribute = str | float | None


def element(name: str, attributes: dict[str, Attribute] | None = None, *children: str) -> str:
    """Write an element. Children are markup already; values are escaped; None leaves an attribute out.

    >>> element("rect", {"x": 1.0, "width": 2.5, "class": 'a"b'})
    '<rect x="1" width="2.5" class="a&quot;b"/>'
    """
    pairs = (attributes or {}).items()
    written = "".join(f' {key}="{_value(value)}"' for key, value in pairs if value is not None)
    inside = "".join(children)
    return f"<{name}{written}>{inside}</{name}>" if inside else f"<{name}{written}/>"


def text(content: str, x: float, y: float, attributes: dict[str, Attribute] | None = None) -> str:
    """Write a line of text on baseline y that starts (or, by ``text-anchor``, is centred or ends) at x."""
    return element("text", {"x": x, "y": y, **(attributes or {})}, escape(content))


def title(content: str) -> str:
    """Write what a browser shows when the pointer rests on the element around this."""
    return element("title", None, escape(content))


def points(pairs: Iterable[tuple[float, float]]) -> str:
    """Write coordinates as ``polyline`` wants them.

    >>> points([(0, 1.5), (2, 3)])
    '0,1.5 2,3'
    """
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in pairs)


def picture(width: float, height: float, label: str, children: Iterable[str], name: str) -> str:
    """Write a whole drawing, `width` × `height` pixels in natural size, with a label for screen readers."""
    return element(
        "svg",
        {
            "class": name,
            "viewBox": f"0 0 {_number(width)} {_number(height)}",
            "width": width,
            "height": height,
            "role": "img",
            "aria-label": label,
        },
        *children,
    )


def standalone(drawing: str) -> str:
    """Give a `picture` that stands on a page what it needs to be a file of its own: light colours, on white.

    >>> standalone(picture(4, 2, "nothing", [], "chart")).startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    True
    """
    start, _, rest = drawing.removeprefix("<svg").partition(">")
    if start.endswith("/"):
        start, rest = start[:-1], "</svg>"
    ground = element("rect", {"width": "100%", "height": "100%", "fill": "#fff"})
    style = element("style", None, _STYLE)
    return f'<svg xmlns="http://www.w3.org/2000/svg"{start}>{style}{ground}{rest}\n'


_STYLE = """
svg { font-family: system-ui, sans-serif; font-size: 12px; }
text { fill: #1b1f24; }
.tick, .quiet { fill: #57606a; }
.heading { font-size: 14px; }
.heading .strong { font-weight: 650; }
.number { font-size: 11px; text-anchor: middle; }
.number.black { fill: #000; }
.number.white { fill: #fff; }
.lane { fill: #f0f2f4; }
.grid { stroke: #d8dee4; }
.axis { stroke: #57606a; }
.finish { stroke: #1b1f24; stroke-width: 1.5; stroke-dasharray: 4 3; }
"""
"""What the style sheet of the pages says of a drawing, for a light page."""


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else _number(value)


def _number(value: float) -> str:
    """Hundredths of a pixel are enough; no trailing zeros and no minus zero."""
    return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")
