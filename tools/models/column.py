"""Puts the column of compiled stages into a page that is there, and leaves its other columns as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from tools.models.page import (
    COMPILED_COLUMN,
    SECOND_PART,
    compiled_cell,
    compiled_count,
    compiled_reasons,
    compiled_text,
    versions,
)
from tools.models.row import Row

__all__ = ["with_compiled"]

_NOTHING = Row("", "", "")


def with_compiled(page: str, rows: Mapping[str, Row]) -> str:
    """Return the page with the column of the first part made from ``rows``; what was there of it is gone.

    Args:
        rows: by name; a row of the page that is not among them says so.
    """
    first, second = page.split(SECOND_PART)
    names = re.findall(r"^\| ([^|]+) \| `[^`]+` \|", first, re.MULTILINE)
    ordered = [rows.get(name, _NOTHING) for name in names]
    lines = "\n".join(_lines(first.rstrip("\n").split("\n"), rows))
    lines = re.sub(
        r"in everything(, [^;]*)?; torch's", f"in everything, {compiled_count(ordered)}; torch's", lines
    )
    reasons = "".join(f"\n{reason}" for reason in compiled_reasons(ordered))
    if reasons and "## Why not" not in lines:
        reasons = f"\n\n## Why not\n{reasons}"
    return f"{lines}{reasons}\n\n{SECOND_PART}{second}"


def _lines(lines: Sequence[str], rows: Mapping[str, Row]) -> Iterator[str]:
    """The lines of the first part, without the reasons of compiled rows."""
    place, replaced = 0, False
    for line in lines:
        if line.startswith(("| compiled |", "- **")) and re.match(
            r"\| compiled|- \*\*[^*]+\*\* \(compiled\)", line
        ):
            continue
        if line.startswith("| torch |"):
            yield f"| compiled | {compiled_text()}. Made with {versions()} |"
        if line.startswith("| architecture |"):
            columns = line.strip("| ").split(" | ")
            place, replaced = columns.index("torch"), COMPILED_COLUMN in columns
            yield _with_cell(line, COMPILED_COLUMN, place, replaced=replaced)
        elif place and line.startswith("|---"):
            yield "---".join("|" * (line.count("|") + (not replaced)))
        elif place and line.startswith("| "):
            row = rows.get(line.split(" | ")[0].strip("| "), _NOTHING)
            yield _with_cell(line, compiled_cell(row), place, replaced=replaced)
        else:
            place = place if line else 0
            yield line


def _with_cell(line: str, cell: str, place: int, *, replaced: bool) -> str:
    cells = line.strip("| ").split(" | ")
    before = cells[: place - 1] if replaced else cells[:place]
    return f"| {' | '.join([*before, cell, *cells[place:]])} |"
