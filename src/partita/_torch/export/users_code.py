"""Which files hold the code of a model and its user."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import mpmath  # type: ignore[import-untyped]
import sympy  # type: ignore[import-untyped]
import torch
from torch import nn

__all__ = ["asking_line", "is_users"]

_PARTITA = str(Path(__file__).parents[2])
_NOT_THE_USERS = (*(str(Path(module.__path__[0])) for module in (torch, sympy, mpmath)), _PARTITA, "<")
_TORCH = str(Path(torch.__path__[0]))
_PYTHON = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")
"""What is installed may lie within Python's own folder."""
_MODULE_CALL = nn.Module._call_impl.__code__


def is_users(filename: str) -> bool:
    """Whether a file is the user's own code, or of a library of models, and not torch's, partita's or
    Python's.

    >>> is_users("train.py"), is_users(torch.__file__)
    (True, False)
    """
    if filename.startswith(_NOT_THE_USERS):
        return False
    return not filename.startswith(_PYTHON) or any(folder in filename for folder in _INSTALLED)


def asking_line() -> str | None:
    """Return the line of the model that is running, as ``code  # file:line in function``; None where none is.

    It is the innermost one on the stack that is the user's. In a model of torch's modules alone that would be
    the line of the script around it, which asks for nothing: there it is that of the innermost ``forward``.
    """
    forward: FrameType | None = None
    stack = _stack(sys._getframe(1))
    for frame in stack:
        code = frame.f_code
        if is_users(code.co_filename):
            if forward is None or any(outer.f_code is _MODULE_CALL for outer in stack):
                return _line(frame)
            break  # the script around the model
        if forward is None and code.co_name == "forward" and code.co_filename.startswith(_TORCH):
            forward = frame
    return None if forward is None else _line(forward)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType) -> str:
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return f"{line}  # {code.co_filename}:{frame.f_lineno} in {code.co_name}"
