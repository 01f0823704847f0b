# ruff: noqa: SLF001 - what only private parts of Python tell
"""The exception that ends a process, for exit handlers."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import traceback
from functools import cache, wraps
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["ending_error", "see_how_child_ends"]

_BOOTSTRAP: Any = BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]
"""Runs what a process of multiprocessing is for. Until Python 3.12 it calls exit handlers, too, while an
exception passes through it; since 3.13 they are called when it has printed that, and dropped it.
"""
_child_error: list[BaseException] = []
"""What has ended a process of multiprocessing, once that is known."""


def ending_error() -> BaseException | None:
    """Return the exception that ends this process; None where it ends without one.

    In a process of multiprocessing's ``sys.exit(3)`` counts too. At the top of a script it can't be seen:
    Python drops the `SystemExit`, and its code, before it calls any function.
    """
    error = next(iter(_child_error), None) or sys.exception() or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) and not error.code else error


def see_how_child_ends() -> None:
    """Let `ending_error` know what ends a process of multiprocessing, if this is one."""
    if multiprocessing.parent_process() is not None and "_exit_function" not in _BOOTSTRAP.co_names:
        _watch_bootstrap()


@cache  # once a process
def _watch_bootstrap() -> None:
    own = traceback.print_exc

    @wraps(own)
    def print_exc(*args: Any, **kwargs: Any) -> None:
        error = sys.exception()
        if error is not None and sys._getframe(1).f_code is _BOOTSTRAP:
            _child_error.append(error)
        own(*args, **kwargs)

    traceback.print_exc = print_exc
    threading._register_atexit(_note_exit_code)  # type: ignore[attr-defined]


def _note_exit_code() -> None:
    """A `SystemExit` is not printed, but its code is known when threads are waited for."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _BOOTSTRAP and not _child_error and frame.f_locals.get("exitcode"):
            _child_error.append(SystemExit(frame.f_locals["exitcode"]))
        frame = frame.f_back  # type: ignore[assignment]
