"""When functions of ``torch.compile`` run as they were written, and when what was compiled begins to run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import CodeType
from typing import Any

import torch

__all__ = ["compiles_what_it_is_given", "default_stance", "nothing_compiled", "when_traced"]


class _Switch:
    """Turned off by the first of the threads that are inside, and on again by the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._stance: AbstractContextManager[object]

    def enter(self) -> None:
        with self._lock:
            if not self._inside:
                self._stance = torch.compiler.set_stance("force_eager")  # in force from here on
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stance.__exit__(None, None, None)


_SWITCH = _Switch()


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Run a block under the stance ``force_eager``. May be nested, and entered by several threads at once.

    A stance holds for all threads of a process. Were each to put back what it found, one that came second and
    left last would put back ``force_eager``, and no function of the user's were compiled from then on.
    """
    _SWITCH.enter()
    try:
        yield
    finally:
        _SWITCH.leave()


def compiles_what_it_is_given() -> bool:
    """Whether a function of ``torch.compile`` that is called now is compiled, and by its own backend: no
    stance and no setting lets it run as it was written.
    """
    from torch._dynamo import config

    return default_stance() and not config.disable and not config.suppress_errors


def default_stance() -> bool:
    """Whether no stance is set."""
    stance = _eval_frame()._stance
    return stance.stance == "default" and stance.backend is None


@cache
def _eval_frame() -> Any:
    from torch._dynamo import eval_frame  # half a second, for who compiles

    return eval_frame


class _Watch(threading.local):
    traced: Callable[[], None] | None = None


_watch = _Watch()


@contextmanager
def when_traced(traced: Callable[[], None]) -> Iterator[None]:
    """In a block, call ``traced`` when Dynamo has traced a function in this thread, before that runs. Where
    nothing is left to compute no backend is called, and what the function does to Python's objects is done
    all the same. What ``traced`` raises is raised by the call of the function, of which nothing is kept then.
    """
    _register_watch()
    _watch.traced = traced
    try:
        yield
    finally:
        _watch.traced = None


@cache
def _register_watch() -> None:
    """For all threads, and for good: those of other threads may go through the hooks at any time."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    register_bytecode_hook(_call_watch)


def _call_watch(code: CodeType, new_code: CodeType) -> None:  # noqa: ARG001 - as Dynamo calls it
    if _watch.traced is not None:
        _watch.traced()
