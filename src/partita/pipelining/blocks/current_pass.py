"""The pass of a stage that a thread is in, to which the model's modules tell their calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from partita._torch.modules.calls import Around

__all__ = ["EndOfStage", "HearsCalls", "current_pass", "no_current_pass", "set_current_pass"]


class EndOfStage(BaseException):
    """Leaves ``forward`` at the end of a stage. No ``except Exception`` of the model catches it."""


class HearsCalls(Protocol):
    """What is told of calls of modules."""

    @property
    def is_in_stage(self) -> bool:
        """Whether the code that runs now is the stage's own: not that of an earlier one, nor what its end
        leaves by.
        """
        ...

    def enter(self, path: str, arguments: Any) -> Around | None:
        """A module is about to be called. Return what goes around the call."""
        ...

    def leave(self, path: str) -> None:
        """A module has returned."""
        ...


class _Current(threading.local):
    stage_pass: HearsCalls | None = None


_current = _Current()


def current_pass() -> HearsCalls | None:
    """The pass that this thread is in."""
    return _current.stage_pass


def set_current_pass(stage_pass: HearsCalls | None) -> HearsCalls | None:
    """Let this thread be in a pass, or in none. Return the one that it was in."""
    before, _current.stage_pass = _current.stage_pass, stage_pass
    return before


@contextmanager
def no_current_pass() -> Iterator[None]:
    """In this block nobody is told of calls."""
    before = set_current_pass(None)
    try:
        yield
    finally:
        set_current_pass(before)
