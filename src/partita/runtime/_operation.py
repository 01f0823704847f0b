"""Handles of operations of torch's process groups, and what to say of one that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from partita._torch.distributed import RawGroup, RawWork
from partita.errors import ExecutionError
from partita.runtime.whereabouts import WAITING, Wait

__all__ = ["Operation", "words_of"]

Key = tuple[Any, ...]
"""What an operation is: ``("send to", peer, tag, number)``, ``("recv from", peer, tag, number)``,
``("collective", ranks, number)``. The number counts those that are alike otherwise, from 1.
"""


class Owner(Protocol):
    """The comm that an operation belongs to.

    Attributes:
        timeout: how long a wait may take.
        name: the same on all ranks, and of no other comm.
    """

    timeout: timedelta
    name: str

    def explain(self, error: RuntimeError, wait: Wait, what: str) -> ExecutionError:
        """What to raise for `error`, which ended an operation."""
        ...

    def note_launched(self, pair: RawGroup, operation: Operation) -> None:
        """The device will come to it after all earlier ones of that communicator."""
        ...


class Operation:
    """The handle of an operation under way."""

    __slots__ = ("_comm", "_finish", "_pair", "_tensor", "_what", "_work", "key", "needs")

    def __init__(
        self,
        comm: Owner,
        work: RawWork,
        key: Key,
        needs: Sequence[int],
        tensor: torch.Tensor,
        finish: Callable[[], None] | None,
        pair: RawGroup | None = None,
        what: str = "",
    ) -> None:
        """``needs``: the ranks without whose part it can't end. ``pair``: the NCCL communicator of a message,
        whose wait is the device's and not the host's. ``what``: in words; empty for a message, whose words
        are found when they are needed.
        """
        self._comm = comm
        self._work: RawWork | None = work
        self.key = key
        self.needs = needs
        self._what = what
        self._tensor: torch.Tensor | None = tensor  # its memory is read or written until the wait is over
        self._finish = finish
        self._pair = pair

    @property
    def comm_name(self) -> str:
        """Of the comm that it belongs to."""
        return self._comm.name

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
        thread = threading.get_ident()
        WAITING[thread] = self
        try:
            self._work.wait(self._comm.timeout)
        except RuntimeError as error:
            raise self._explained(error) from error
        finally:
            del WAITING[thread]
        self._work = self._tensor = None

    def flush(self, timeout: timedelta) -> None:
        """Waits for at most `timeout`; raises gloo's own RuntimeError, unexplained."""
        if self._work is not None:
            self._work.wait(timeout)

    def _explained(self, error: RuntimeError) -> ExecutionError:
        return self._comm.explain(error, self, self._what or words_of(self.key))


def words_of(key: Key) -> str:
    """Of a message's key."""
    way, peer, tag, _ = key
    return f"{way} rank {peer} (tag {tag})"
