"""Colours of what a rank does, chosen so that colour-blind readers can tell them apart.

The hues are the eight of Okabe and Ito, "Color Universal Design" (2008). A block's shade tells its
microbatch: the first has the full hue, the last is mixed with white. Text on it is black or white, whichever
has more contrast.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "BLACK",
    "KINDS",
    "WHITE",
    "Colour",
    "KindStyle",
    "contrast",
    "hexadecimal",
    "ink_on",
    "kind_style",
    "shade",
]


class Colour(NamedTuple):
    """Red, green and blue of sRGB, 0 to 255."""

    red: int
    green: int
    blue: int


class KindStyle(NamedTuple):
    """How a kind of span is named and coloured."""

    name: str
    colour: Colour


BLACK = Colour(0, 0, 0)
WHITE = Colour(255, 255, 255)
_PALEST = 0.4  # how much white the last microbatch's shade holds

KINDS: dict[str, KindStyle] = {
    "F": KindStyle("forward", Colour(0, 114, 178)),  # blue
    "B": KindStyle("backward", Colour(230, 159, 0)),  # orange
    "I": KindStyle("gradient of inputs", Colour(213, 94, 0)),  # vermillion
    "W": KindStyle("gradient of weights", Colour(0, 158, 115)),  # bluish green
    "OVERLAP_F_B": KindStyle("forward and backward together", Colour(86, 180, 233)),  # sky blue
    "comm": KindStyle("communication", Colour(204, 121, 167)),  # reddish purple
    "handling": KindStyle("starting messages", Colour(96, 104, 118)),  # slate
}
_OTHER = Colour(128, 132, 138)


def kind_style(kind: str) -> KindStyle:
    """Return name and colour of a kind; an unknown one is called by its own name, and grey."""
    return KINDS.get(kind, KindStyle(kind, _OTHER))


def shade(colour: Colour, position: float) -> Colour:
    """Mix the colour with white: not at all at position 0, most at position 1."""
    white = _PALEST * min(1.0, max(0.0, position))
    return Colour(*(round(part + (255 - part) * white) for part in colour))


def ink_on(background: Colour) -> Colour:
    """Return black or white, whichever is easier to read on the background (contrast is never below 4.5)."""
    return max((BLACK, WHITE), key=lambda ink: contrast(ink, background))


def contrast(one: Colour, other: Colour) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.2, "contrast ratio")."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def hexadecimal(colour: Colour) -> str:
    """Return the colour as CSS writes it.

    >>> hexadecimal(Colour(0, 114, 178))
    '#0072b2'
    """
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _luminance(colour: Colour) -> float:
    """Relative luminance, 0 to 1 (WCAG 2.2)."""
    red, green, blue = (_linear(part / 255) for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(part: float) -> float:
    return float(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
