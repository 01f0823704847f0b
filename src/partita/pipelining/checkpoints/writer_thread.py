"""The thread that writes beside training, and what becomes of it when the process ends.

Python waits for the threads of its own pools before anything else is told that a script has failed, and the
other ranks would wait for as long as one writes. This thread is waited for where the process ends in order;
where it fails, only for what no other rank has a part in.
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

from partita.runtime.failure import ending_error

__all__ = ["WriterThread", "writer_thread"]

_GIVEN_UP_S = 1.0
"""How long a process that has failed waits for what it writes with others to be given up."""


class WriterThread:
    """Runs what it is given, in order. It is not waited for by Python itself."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._unfinished: dict[Future[Any], bool] = {}
        self._begun = False

    def submit(self, function: Callable[[], Any], *, with_others: bool) -> Future[Any]:
        """Let the thread call ``function``.

        Args:
            with_others: whether other ranks have a part in it. Where they have, call this after the comm for
                it was made: what was made last is asked first when the process ends.
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
            del future, function  # what was written is not kept until there is something else

    def finish(self) -> None:
        """The process ends: wait for what is to be written whole."""
        failed = ending_error() is not None
        wait([one for one, with_others in list(self._unfinished.items()) if not (failed and with_others)])

    def give_up(self) -> None:
        """The other ranks have been told that this one has failed: soon nothing is written any more."""
        wait(list(self._unfinished), _GIVEN_UP_S)


@cache
def writer_thread() -> WriterThread:
    """One for all that is written beside training: ranks write in the order in which they began to."""
    return WriterThread()


@atexit.register  # when this is imported: called after the comms have ended
def _give_up() -> None:
    if writer_thread.cache_info().currsize:
        writer_thread().give_up()


os.register_at_fork(after_in_child=writer_thread.cache_clear)
