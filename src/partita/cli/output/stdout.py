"""What a command prints: as wide as the terminal, or as its tables where there is none; in any encoding."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from typing import Any

from rich.console import Console

__all__ = ["drawing_width", "print_json", "stdout_console", "take_any_character"]

_WIDE = 400
"""Wider than any table."""
_NARROWEST_DRAWING, _DRAWING = 20, 100
_LIKENESSES = {"\N{MICRO SIGN}": "u", "×": "x", "…": "~", "→": ">", "–": "-", "−": "-"}
_LIKENESSES |= {"│": "|", "┌": "+", "└": "+", "●": "*"}
"""One character for one, so that tables and drawings keep their columns."""


def take_any_character() -> None:
    """Let standard output show what is like a character where its encoding has none, as ``LC_ALL=C`` and
    Latin-1 terminals have no µ or no box drawing; else the command would end in an error of Python's.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        codecs.register_error("partita.likeness", _likeness)
        sys.stdout.reconfigure(errors="partita.likeness")


def _likeness(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)  # as standard output is only written to
    characters = error.object[error.start : error.end]
    return "".join(_LIKENESSES.get(character, "?") for character in characters), error.end


def stdout_console() -> Console:
    """A console for standard output. Where that is no terminal and ``COLUMNS`` says nothing, lines are as
    long as what stands in them.
    """
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return Console()
    return Console(width=_WIDE)


def drawing_width(console: Console) -> int:
    """How wide a drawing is that fills all the width there is."""
    return _DRAWING if console.width == _WIDE else max(_NARROWEST_DRAWING, console.width)


def print_json(**values: Any) -> None:
    """What a command has written, for other programs."""
    print(json.dumps(values, indent=2))
