"""Compiled functions that run as they were written, for as long as any thread asks for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

__all__ = ["compiles_what_it_is_given", "nothing_compiled"]


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
    from torch._dynamo import config, eval_frame  # half a second, for who compiles

    stance = eval_frame._stance
    by_itself = stance.stance == "default" and stance.backend is None
    return by_itself and not config.disable and not config.suppress_errors
