"""The line of the user's own code that an error comes from."""

from __future__ import annotations

import traceback
from traceback import FrameSummary
from types import FrameType

from partita._torch.export.users_code import is_users

__all__ = ["line_of", "summary", "users_line"]


def line_of(frame: FrameType) -> str:
    """Return the present line of ``frame``, as ``code  # file:line in function``."""
    code = frame.f_code
    return _line(FrameSummary(code.co_filename, frame.f_lineno, code.co_name))


def users_line(error: BaseException) -> str:
    """Return the line of the user's code that raised an error, as ``code  # file:line in function``.

    For an error in torch's own modules (``nn.Linear``) that is the line that calls them. Empty where none of
    the user's code was running.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return _line(frame)
    return ""


def summary(error: BaseException) -> str:
    """Return the first line of an error's message, with the line of the user's code where one is known."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    line = users_line(error)
    return f"{first} (at {line})" if line and line not in first else first


def _line(frame: FrameSummary) -> str:
    return f"{frame.line}  # {frame.filename}:{frame.lineno} in {frame.name}"
