"""Handles of operations of torch's process groups, and what to say of one that fails."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch

from partita._torch.distributed import RawGroup, RawWork
from partita.errors import ExecutionError

__all__ = ["Operation", "message_words"]


class Owner(Protocol):
    """The comm that an operation belongs to.

    Attributes:
        timeout: how long a wait may take.
    """

    timeout: timedelta

    def explain(self, error: RuntimeError, peer: int, what: str) -> ExecutionError:
        """What to raise for `error`, which ended an operation with `peer`."""
        ...

    def note_launched(self, pair: RawGroup, operation: Operation) -> None:
        """The device will come to it after all earlier ones of that communicator."""
        ...


class Operation:
    """The handle of an operation under way."""

    __slots__ = ("_comm", "_finish", "_pair", "_peer", "_tensor", "_what", "_work")

    def __init__(
        self,
        comm: Owner,
        work: RawWork,
        peer: int,
        what: str | tuple[str, int, int],
        tensor: torch.Tensor,
        finish: Callable[[], None] | None,
        pair: RawGroup | None = None,
    ) -> None:
        """``what``: for messages; that of a message (way, peer, tag) is put into words when it is needed.
        ``pair``: the NCCL communicator of a message, whose wait is the device's and not the host's.
        """
        self._comm = comm
        self._work: RawWork | None = work
        self._peer = peer
        self._what = what
        self._tensor: torch.Tensor | None = tensor  # its memory is read or written until the wait is over
        self._finish = finish
        self._pair = pair

    def wait(self) -> None:
        if self._work is None:
            return
        if self._pair is None:
            self.settle()
        elif self._tensor is not None:
            try:
                self._work.wait()  # a timeout would make the host wait
            except RuntimeError as error:
                raise self._explained(error) from error
            self._tensor = None  # later work on the device comes after it
            self._comm.note_launched(self._pair, self)
        else:
            return
        if self._finish is not None:
            self._finish()

    def settle(self) -> None:
        """Until it is done, wherever it runs."""
        assert self._work is not None
        try:
            self._work.wait(self._comm.timeout)
        except RuntimeError as error:
            raise self._explained(error) from error
        self._work = None

    def flush(self, timeout: timedelta) -> None:
        """Waits for at most `timeout`; raises gloo's own RuntimeError, unexplained."""
        if self._work is not None:
            self._work.wait(timeout)

    def _explained(self, error: RuntimeError) -> ExecutionError:
        what = self._what if isinstance(self._what, str) else message_words(*self._what)
        return self._comm.explain(error, self._peer, what)


def message_words(way: str, peer: int, tag: int) -> str:
    """``way``: "send to" or "recv from"."""
    return f"{way} rank {peer} (tag {tag})"
