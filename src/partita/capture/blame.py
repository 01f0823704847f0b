"""Which line of the user's own code an error comes from."""

from __future__ import annotations

import traceback
from traceback import FrameSummary
from types import FrameType

from partita._torch.export.users_code import is_users

__all__ = ["line_of", "summary", "users_line"]


def line_of(frame: FrameType) -> str:
    """The line that ``frame`` is at, as ``code  # file:line in function``."""
    code = frame.f_code
    return _told(FrameSummary(code.co_filename, frame.f_lineno, code.co_name))


def users_line(error: BaseException) -> str:
    """Where in the user's code an error was raised, as ``code  # file:line in function``; empty where none of
    it ran.

    Torch's own modules (``nn.Linear``) don't count as the user's: what is shown is who calls them.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return _told(frame)
    return ""


def summary(error: BaseException) -> str:
    """The first line of an error's message, and the user's line where one is known."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    line = users_line(error)
    return f"{first} (at {line})" if line and line not in first else first


def _told(frame: FrameSummary) -> str:
    return f"{frame.line}  # {frame.filename}:{frame.lineno} in {frame.name}"
