"""The console for what a command prints: as wide as the terminal, or as its tables where there is none."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console

__all__ = ["drawing_width", "print_json", "stdout_console"]

_WIDE = 400
"""Wider than any table."""
_NARROWEST_DRAWING, _DRAWING = 20, 100


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
