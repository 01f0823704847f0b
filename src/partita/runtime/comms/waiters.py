"""Threads that make blocking calls for the caller, so that a failure ends its wait whatever the call does.

A wait in C++ can't be ended from Python, and gloo does not end all of them: where a connection closes in the
middle of a large message, neither its sender nor its receiver is woken before the operation's own timeout,
half an hour by default (torch 2.13). So the C++ call is made in a thread of its own. The caller waits for a
reply, which comes from that thread or, after a failure, from :meth:`Waiters.release`::

    caller     wait(calls) -------- blocks ------------------ goes on
    thread         calls() in C++ ----------------- reply --'    |
    watch thread                       release() ----------------'
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

__all__ = ["Waiters"]

_END_S = 0.5
"""How long `Waiters.end` waits for calls that a failure should have ended."""


@dataclass(eq=False, repr=False)
class _Job:
    """Calls that one thread makes, one after the other.

    Attributes:
        is_left: no caller waits for it any more.
        kept: what must not be destroyed before it has ended.
    """

    calls: Iterable[Callable[[], object]]
    replies: SimpleQueue[BaseException | None] = field(default_factory=SimpleQueue)
    is_left: bool = False
    kept: Any = None

    def run(self) -> BaseException | None:
        """Make the calls, in the thread; return the error that has ended them."""
        try:
            calls = iter(self.calls)
            while not self.is_left and (call := next(calls, None)) is not None:
                call()
        except BaseException as error:  # the caller's, whatever it is: it waits for a reply
            return error
        return None


class Waiters:
    """The threads of one comm, started as they are needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._busy: set[_Job] = set()
        self._threads: list[threading.Thread] = []
        self._released = False

    def wait(self, calls: Iterable[Callable[[], object]]) -> None:
        """Make all `calls`, one after the other, and return when they have ended.

        Raises:
            RuntimeError: there was a failure, and the calls have not ended; or what a call raised.
        """
        job = _Job(calls)
        with self._lock:
            if self._released:
                raise RuntimeError("the comm has failed")
            self._start(job)
        try:
            error = job.replies.get()
        except BaseException:  # a signal's
            job.is_left = True
            raise
        if error is not None:
            try:
                raise error
            finally:
                del error  # which holds this frame

    def release(self) -> None:
        """End all waits, those that come later too, after a failure."""
        with self._lock:
            self._release()

    def end(self, calls: Iterable[Callable[[], object]] = (), kept: Any = None) -> None:
        """End the threads, but for those whose calls never end.

        Args:
            calls: more calls to wait for, a short time; a failure should have ended them.
            kept: what must not be destroyed before all calls have ended.
        """
        with self._lock:
            self._release()
            try:
                for call in calls:
                    self._start(_Job((call,)))
            except RuntimeError:  # the interpreter is shutting down, and starts none
                _never_destroy(kept)
            for job in self._busy:
                job.kept = kept
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()
            threads, self._threads = self._threads, []
        end = time.monotonic() + _END_S
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))

    def _release(self) -> None:
        self._released = True
        for job in self._busy:
            job.is_left = True
            job.replies.put(RuntimeError("the comm has failed"))

    def _start(self, job: _Job) -> None:
        if self._idle:
            inbox = self._idle.pop()
        else:
            inbox = SimpleQueue()
            thread = threading.Thread(target=self._work, args=(inbox,), name="partita-wait", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._busy.add(job)
        inbox.put(job)

    def _work(self, inbox: SimpleQueue[_Job | None]) -> None:
        while (job := inbox.get()) is not None:
            error = job.run()
            with self._lock:
                self._busy.discard(job)
                is_last = self._released
                if not is_last:
                    self._idle.append(inbox)  # before the reply: who gets that may come again at once
            if not job.is_left:
                job.replies.put(error)
            del job, error
            if is_last:
                return


def _never_destroy(kept: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
