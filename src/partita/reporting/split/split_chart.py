"""The pieces of a model in SVG: a box a stage, an arrow a border, an arc for what goes past a stage."""

from __future__ import annotations

from collections.abc import Iterator

from partita.reporting.drawing.palette import KINDS, hexadecimal
from partita.reporting.drawing.svg import Attribute, element, text, title
from partita.reporting.drawing.units import format_bytes, format_count
from partita.reporting.split.split_report import CrossingRow, PieceRow, StagesReport

__all__ = ["split_chart"]

_WIDTH, _BOX, _LEFT, _TOP = 800.0, 440.0, 24.0, 20.0
_HEIGHT, _GAP = 58.0, 44.0
_MOST_LETTERS = 58
_INK, _QUIET, _LINE = "#1f2328", "#59636e", "#8c959f"
_BLUE, _ORANGE, _GREEN = (hexadecimal(KINDS[kind].colour) for kind in ("F", "B", "W"))


def split_chart(report: StagesReport) -> str:
    """Draw the report as a whole SVG file, which HTML may contain too. The same report gives the same text.

    A bar in each box compares the stage's parameters with the largest stage's. Arcs to the right are values
    that go past a stage; dashed ones join the stages of a tied parameter.
    """
    height = 2 * _TOP + len(report.pieces) * (_HEIGHT + _GAP) - _GAP
    most = max(piece.parameters for piece in report.pieces) or 1
    parts = [element("rect", {"width": _WIDTH, "height": height, "fill": "#ffffff"})]
    for piece in report.pieces:
        parts.extend(_box(piece, piece.parameters / most))
    parts.extend(_arrow(row) for row in report.crossings if not row.is_skip)
    skips = [row for row in report.crossings if row.is_skip]
    parts.extend(
        _arc(row.sender, row.receiver, number, _BLUE, f"{row.sender} → {row.receiver}: {_crossing(row)}")
        for number, row in enumerate(skips)
    )
    for number, tied in enumerate(report.tied, start=len(skips)):
        stages = ", ".join(map(str, tied.stages))
        words = f"tied in {stages}: {' = '.join(tied.names)}, {format_bytes(tied.bytes)}"
        parts.append(_arc(tied.stages[0], tied.stages[-1], number, _ORANGE, words, dashed=True))
    attributes: dict[str, Attribute] = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {_WIDTH:g} {height:g}",
        "width": _WIDTH,
        "height": height,
        "role": "img",
        "aria-label": f"{report.title}: {len(report.pieces)} stages",
        "font-family": "system-ui, sans-serif",
        "font-size": 13,
    }
    return element("svg", attributes, *parts)


def _top(stage: int) -> float:
    return _TOP + stage * (_HEIGHT + _GAP)


def _box(piece: PieceRow, share: float) -> Iterator[str]:
    y = _top(piece.stage)
    modules = ", ".join(piece.modules) or "no modules"
    shown = modules if len(modules) <= _MOST_LETTERS else f"{modules[: _MOST_LETTERS - 1]}…"
    border = {"x": _LEFT, "y": y, "width": _BOX, "height": _HEIGHT, "rx": 6}
    yield element("rect", {**border, "fill": "#f6f8fa", "stroke": _LINE}, title(modules))
    yield element(
        "rect", {"x": _LEFT, "y": y + _HEIGHT - 6, "width": _BOX * share, "height": 4, "fill": _GREEN}
    )
    yield text(f"stage {piece.stage}", _LEFT + 12, y + 21, {"fill": _INK, "font-weight": "bold"})
    size = f"{format_count(piece.parameters)} parameters, {format_bytes(piece.parameter_bytes)}"
    yield text(size, _LEFT + _BOX - 12, y + 21, {"fill": _QUIET, "text-anchor": "end"})
    yield text(shown, _LEFT + 12, y + 42, {"fill": _INK})


def _arrow(row: CrossingRow) -> str:
    x, start, end = _LEFT + _BOX / 2, _top(row.sender) + _HEIGHT, _top(row.receiver)
    line = element("line", {"x1": x, "y1": start, "x2": x, "y2": end - 6, "stroke": _BLUE, "stroke-width": 2})
    head = element("path", {"d": f"M{x - 5:g} {end - 8:g}h10l-5 8z", "fill": _BLUE})
    words = text(_crossing(row), x + 12, (start + end) / 2 + 4, {"fill": _QUIET})
    return element("g", None, title("\n".join(row.values)), line, head, words)


def _arc(start: int, end: int, number: int, colour: str, words: str, *, dashed: bool = False) -> str:
    """A line on the right of the boxes from one stage to another, further out the higher its number."""
    x, out = _LEFT + _BOX, _LEFT + _BOX + 24 + 10 * (number % 6)
    y1, y2 = _top(start) + _HEIGHT / 2, _top(end) + _HEIGHT / 2
    path = element(
        "path",
        {
            "d": f"M{x:g} {y1:g}H{out:g}V{y2:g}H{x:g}",
            "fill": "none",
            "stroke": colour,
            "stroke-width": 1.5,
            "stroke-dasharray": "5 4" if dashed else None,
        },
    )
    middle = (y1 + y2) / 2 + 16 * (number % 6) - 24
    shown = words if len(words) <= 32 else f"{words[:31]}…"
    # Beside the outermost line, so that no line goes through the words.
    return element("g", None, title(words), path, text(shown, x + 24 + 60, middle, {"fill": _QUIET}))


def _crossing(row: CrossingRow) -> str:
    back = f", {format_bytes(row.backward_bytes)} back" if row.backward_bytes else ""
    return f"{format_bytes(row.forward_bytes)} on{back}"
