"""The one thread of a process that watches over its comms. It runs while there is a comm.

It sleeps until a descriptor can be read, or for half a second, and then calls the
:class:`~partita.runtime.failures.failure_detector.FailureDetector` of each comm.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

__all__ = ["WATCH", "Watched"]

_TICK_S = 0.5
_JOIN_S = 2.0


class Watched(Protocol):
    """What the thread watches. Only the thread calls these methods."""

    def handles(self) -> Mapping[int, int]:
        """Return descriptors, and the events of ``poll`` to wait for."""
        ...

    def ready(self, handle: int) -> None:
        """Handle a descriptor that can be read or written."""
        ...

    def tick(self, now: float) -> None:
        """Do what is due."""
        ...

    @property
    def due_s(self) -> float:
        """The seconds after which `tick` has something to do."""
        ...

    def broke(self, error: Exception) -> None:
        """Handle an error of the watch thread itself, which has ended."""
        ...

    def forget(self) -> None:
        """In a forked child: close what it has inherited, and tell the other ranks nothing."""
        ...


class _Watch:
    """The thread, and what it watches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[Watched] = []
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self.stalls: Callable[[float], None] | None = None

    def add(self, watched: Watched) -> None:
        with self._lock:
            self._watched.append(watched)
            if self._thread is None:
                self._wake = socket.socketpair()
                for end in self._wake:
                    end.setblocking(False)
                # A daemon: it does not keep the process alive.
                self._thread = threading.Thread(
                    target=self._run, args=(self._wake,), name="partita-watch", daemon=True
                )
                self._thread.start()
        self.wake()

    def remove(self, watched: Watched) -> None:
        """Stop watching it; when this returns the thread does not touch it any more."""
        with self._lock:
            if watched not in self._watched:
                return
            self._watched.remove(watched)
            last, wake = not self._watched, self._wake
            thread = self._thread
            if last:
                self._thread, self._wake = None, None
        assert wake is not None
        assert thread is not None
        with suppress(OSError):
            wake[1].send(b"x")
        if last:
            # Joined: a thread that came out of C++ while the interpreter shuts down would abort the process.
            thread.join(_JOIN_S)
            for end in wake:
                end.close()
        else:
            with self._turn:
                return

    def wake(self) -> None:
        wake = self._wake
        if wake is not None:
            with suppress(OSError):
                wake[1].send(b"x")

    @property
    def watched(self) -> tuple[Watched, ...]:
        with self._lock:
            return tuple(self._watched)

    _turn = threading.Lock()

    def _run(self, wake: tuple[socket.socket, socket.socket]) -> None:
        try:
            while self._wait_and_look(wake):
                pass
        except Exception as error:  # a rank that hears of no failure would wait for the others for good
            with self._lock:
                watched, self._watched = self._watched, []
                self._wake, self._thread = None, None
            for end in wake:
                end.close()
            for one in watched:
                one.broke(error)

    def _wait_and_look(self, wake: tuple[socket.socket, socket.socket]) -> bool:
        """Return False where this thread is not needed any more."""
        with self._lock:
            if self._wake is not wake:
                return False
            watched = tuple(self._watched)
        poll, owners, due = select.poll(), {}, _TICK_S
        poll.register(wake[0], select.POLLIN)
        for one in watched:
            for handle, events in one.handles().items():
                poll.register(handle, events)
                owners[handle] = one
            due = min(due, one.due_s)
        ready = poll.poll(1000 * max(due, 0.0))
        with self._turn:
            self._look(wake, watched, owners, [handle for handle, _ in ready])
        return True

    def _look(
        self,
        wake: tuple[socket.socket, socket.socket],
        watched: tuple[Watched, ...],
        owners: Mapping[int, Watched],
        ready: list[int],
    ) -> None:
        there = set(map(id, self.watched))
        for handle in ready:
            if handle in owners:
                if id(owners[handle]) in there:
                    owners[handle].ready(handle)
                continue
            with suppress(BlockingIOError):
                while wake[0].recv(4096):
                    pass
        now = time.monotonic()
        for one in watched:
            if id(one) in there:
                one.tick(now)
        if self.stalls is not None:
            self.stalls(now)

    def forget(self) -> None:
        """Forget all in a forked child, as `Watched.forget`."""
        for one in self._watched:
            one.forget()
        for end in self._wake or ():
            end.close()
        self._lock, self._turn = threading.Lock(), threading.Lock()  # the parent may have held them
        self._watched, self._wake, self._thread = [], None, None


WATCH = _Watch()
os.register_at_fork(after_in_child=WATCH.forget)
