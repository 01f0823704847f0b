"""Handles of operations of torch's process groups, and what to say of one that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from partita._torch.distributed.groups import RawGroup, RawWork
from partita.errors import ExecutionError
from partita.runtime.comm import Handle
from partita.runtime.waiters import Waiters
from partita.runtime.whereabouts import WAITING, Wait

__all__ = ["Operation", "finish_all", "wait_all", "words_of"]

_PACKET_BYTES = 1024
"""A message of so many bytes arrives whole or not at all."""

Key = tuple[Any, ...]
"""What an operation is: ``("send to", peer, tag, number)``, ``("recv from", peer, tag, number)``,
``("collective", ranks, number)``. The number counts those that are alike otherwise, from 1.
"""


class Owner(Protocol):
    """The comm that an operation belongs to.

    Attributes:
        timeout: how long a wait may take.
        name: the same on all ranks, and of no other comm.
        waiters: what waits that no failure ends are made in.
        collectives: those under way.
    """

    timeout: timedelta
    name: str
    waiters: Waiters
    collectives: set[Operation]

    def explain(self, error: RuntimeError, wait: Wait, what: str) -> ExecutionError:
        """What to raise for `error`, which ended an operation."""
        ...

    def note_launched(self, pair: RawGroup, operation: Operation) -> None:
        """The device will come to it after all earlier ones of that communicator."""
        ...


class Operation:
    """The handle of an operation under way."""

    __slots__ = ("_finish", "_pair", "_tensor", "_what", "_work", "comm", "key", "needs")

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
        self.comm = comm
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
        return self.comm.name

    @property
    def may_block_for_good(self) -> bool:
        """Whether the wait for it may go on though its connection has ended."""
        if self._work is None or self._pair is not None:
            return False
        assert self._tensor is not None
        return self.key[0] != "recv from" or self._tensor.nbytes > _PACKET_BYTES

    def wait(self) -> None:
        if self._work is None:
            return
        if self._pair is None:
            self.complete()
        elif self._tensor is not None:
            try:
                self._work.wait()  # a timeout would make the host wait
            except RuntimeError as error:
                raise self.explained(error) from error
            self._tensor = None  # later work on the device comes after it
            self.comm.note_launched(self._pair, self)
            self._finished()

    def complete(self) -> None:
        """Until it is done, wherever it runs."""
        if self.may_block_for_good:
            _complete(self.comm, (self,))
            return
        thread = threading.get_ident()
        WAITING[thread] = self
        try:
            self._block_here()
        finally:
            del WAITING[thread]

    def finish(self) -> None:
        """Like `wait`, where it is known to have ended."""
        if self._pair is not None:
            self.wait()
        elif self._work is not None:
            self._block_here()

    def _block_here(self) -> None:
        try:
            self.block()
        except RuntimeError as error:
            raise self.explained(error) from error
        self.completed()

    def block(self) -> None:
        """Until it is done, without holding the interpreter lock."""
        assert self._work is not None
        self._work.wait(self.comm.timeout)

    def completed(self) -> None:
        """It is done."""
        self._work = self._tensor = None
        self.comm.collectives.discard(self)
        self._finished()

    def flush(self, timeout: timedelta) -> None:
        """Waits for at most `timeout`; raises gloo's own RuntimeError, unexplained."""
        if self._work is not None:
            self._work.wait(timeout)

    def explained(self, error: RuntimeError) -> ExecutionError:
        """What to raise for `error`, which has ended it."""
        return self.comm.explain(error, self, self._what or words_of(self.key))

    def _finished(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def wait_all(handles: Sequence[Handle]) -> None:
    """Waits for all of them; between processes that takes hardly longer than to wait for one."""
    blocking = [it for it in handles if isinstance(it, Operation) and it.may_block_for_good]
    for comm in {id(it.comm): it.comm for it in blocking}.values():
        _complete(comm, [it for it in blocking if it.comm is comm])
    for handle in handles:
        handle.wait()


def finish_all(handles: Iterable[Handle]) -> None:
    """What `wait_all` does, where all are known to have ended: faster, but deaf to failures."""
    for handle in handles:
        if isinstance(handle, Operation):
            handle.finish()
        else:
            handle.wait()


def _complete(comm: Owner, operations: Sequence[Operation]) -> None:
    """Waits for them one after the other, in a thread that may stay behind after a failure."""
    thread = threading.get_ident()
    current = operations[0]

    def calls() -> Iterator[Callable[[], None]]:
        nonlocal current
        for operation in operations:
            WAITING[thread] = current = operation
            yield operation.block

    try:
        comm.waiters.wait(calls())
    except RuntimeError as error:
        raise current.explained(error) from error
    finally:
        WAITING.pop(thread, None)
    for operation in operations:
        operation.completed()


def words_of(key: Key) -> str:
    """Of a message's key."""
    way, peer, tag, _ = key
    return f"{way} rank {peer} (tag {tag})"
