"""What a command prints: as wide as the terminal, or as its tables where there is none; in any encoding."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from typing import Any

from rich.console import Console

from partita.errors import UsageError

__all__ = ["drawing_width", "print_json", "refuse_full_disk", "stdout_console", "take_any_character"]

_WIDE = 400
"""Wider than any table."""
_NARROWEST_DRAWING, _DRAWING = 20, 100
_LIKENESSES = {"\N{MICRO SIGN}": "u", "×": "x", "…": "~", "→": ">", "–": "-", "−": "-"}
_LIKENESSES |= {"│": "|", "┌": "+", "└": "+", "●": "*"}
"""One character for one, so that tables and drawings keep their columns."""


class _StandardOutput(io.FileIO):
    """The file behind standard output. What it can't take is an error of partita's, and lost from then on."""

    failed = False

    def write(self, data: Any, /) -> int:
        if self.failed:  # as Python writes what is left once more when it ends
            return len(data)
        try:
            return super().write(data)
        except BrokenPipeError:  # `partita bench | head -1`, which is no mistake
            self.failed = True
            raise
        except OSError as error:
            self.failed = True
            raise UsageError(
                f"standard output can't be written to ({error.strerror}): send it somewhere else"
            ) from error


def refuse_full_disk() -> None:
    """Let writing to a standard output that takes no more (``> /dev/full``) end in a message."""
    old = sys.stdout
    if old is not sys.__stdout__ or not isinstance(old, io.TextIOWrapper):
        return  # somebody has put another in its place
    unbuffered = isinstance(old.buffer, io.FileIO)  # as PYTHONUNBUFFERED asks for
    raw = _StandardOutput(old.fileno(), "wb", closefd=False)
    buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
    sys.stdout = io.TextIOWrapper(
        buffer,
        old.encoding,
        old.errors,
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )


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
