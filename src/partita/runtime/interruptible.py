"""Calls into C++ that may block for good, such as those on a store whose host has stopped: with a limit, and
deaf to nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from partita.errors import ExecutionError

__all__ = ["interruptible"]

_POLL_S = 0.01
T = TypeVar("T")


def interruptible(
    call: Callable[[], T], seconds: float, what: str, check: Callable[[], None] = lambda: None
) -> T:
    """The result of ``call()``, which runs in a daemon thread and is left to itself where it takes too long.

    Args:
        seconds: how long it may take.
        what: for the message.
        check: asked again and again meanwhile; raises where waiting has no use any more.

    Raises:
        ExecutionError: the time is over.
    """
    done = threading.Event()
    ending: dict[str, Any] = {}

    def body() -> None:
        try:
            ending["result"] = call()
        except BaseException as error:
            ending["error"] = error
        done.set()

    threading.Thread(target=body, name="partita-interruptible", daemon=True).start()
    end = time.monotonic() + seconds
    while not done.wait(_POLL_S):
        check()
        if time.monotonic() > end:
            raise ExecutionError(
                f"{what} took longer than {seconds:g} s: is the process that hosts the store (rank 0, as a "
                "rule) alive, and can it be reached? Start all ranks again, or give a larger timeout_s"
            )
    if "error" in ending:
        raise ending["error"]
    result: T = ending["result"]
    return result
