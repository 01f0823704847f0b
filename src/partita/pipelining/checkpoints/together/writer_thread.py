"""The thread that writes snapshots while training goes on, and its end with the process.

Python waits for the threads of its own pools before other exit handlers learn that a script has failed, so
the other ranks would wait for the writing. This thread is waited for where the process ends normally; where
it fails, only for what no other rank takes part in.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import cache
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any

from partita.runtime.failures.ending import ending_error

__all__ = ["WriterThread", "writer_thread"]

_GIVEN_UP_S = 1.0
"""How long a process that has failed waits for the writing that other ranks take part in."""


class WriterThread:
    """Runs functions in order, in a thread that Python itself does not wait for."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._unfinished: dict[Future[Any], bool] = {}
        self._begun = False

    def submit(self, function: Callable[[], Any], *, with_others: bool) -> Future[Any]:
        """Let the thread call ``function``.

        Args:
            with_others: whether other ranks take part in it. If so, call this after the comm for it was made,
                since exit handlers run in reverse order.
        """
        if not self._begun:
            self._begun = True
            # multiprocessing ends its children without atexit; before the comms, which have priority 0
            Finalize(None, self.finish, exitpriority=1)
            threading.Thread(target=self._run, name="partita-snapshot", daemon=True).start()
        future: Future[Any] = Future()
        self._unfinished[future] = with_others
        future.add_done_callback(self._unfinished.pop)
        atexit.unregister(self.finish)
        atexit.register(self.finish)
        self._queue.put((future, function))
        return future

    def _run(self) -> None:
        while True:
            future, function = self._queue.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del future, function  # frees what was written before the next call comes

    def finish(self) -> None:
        """Wait, at the end of the process, for what can still be written completely."""
        failed = ending_error() is not None
        wait([one for one, with_others in list(self._unfinished.items()) if not (failed and with_others)])

    def give_up(self) -> None:
        """Wait a little for the rest, once the other ranks know that this one has failed."""
        wait(list(self._unfinished), _GIVEN_UP_S)


@cache
def writer_thread() -> WriterThread:
    """The one thread for all that is written beside training, so that all ranks write in one order."""
    return WriterThread()


@atexit.register  # when this is imported: called after the comms have ended
def _give_up() -> None:
    if writer_thread.cache_info().currsize:
        writer_thread().give_up()


os.register_at_fork(after_in_child=writer_thread.cache_clear)
