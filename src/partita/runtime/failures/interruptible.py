"""A time limit for calls into C++ that may block for good, such as on a store whose host has stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from partita.errors import ExecutionError

__all__ = ["interruptible"]

_POLL_S = 0.01
T = TypeVar("T")


def interruptible(
    call: Callable[[], T], seconds: float, what: str, check: Callable[[], None] = lambda: None
) -> T:
    """Return the result of ``call()``, which runs in a daemon thread, abandoned where it takes too long.

    Args:
        seconds: how long it may take.
        what: the call in words, for the message.
        check: called again and again meanwhile; raises where waiting has no use any more.

    Raises:
        ExecutionError: the time is over.
    """
    future: Future[T] = Future()

    def body() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name="partita-interruptible", daemon=True).start()
    end = time.monotonic() + seconds
    while not wait([future], _POLL_S).done:
        check()
        if time.monotonic() > end:
            raise ExecutionError(
                f"{what} took longer than {seconds:g} s: is the process that hosts the store (rank 0, as a "
                "rule) alive, and can it be reached? Start all ranks again, or give a larger timeout_s"
            )
    return future.result()
