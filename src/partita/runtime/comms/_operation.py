"""Handles of the operations of torch's process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from partita._torch.distributed.groups import RawGroup, RawWork
from partita.errors import ExecutionError
from partita.runtime.comms.comm import Handle
from partita.runtime.comms.operation_errors import OperationErrors
from partita.runtime.comms.waiters import Waiters
from partita.runtime.failures.thread_activity import WAITING

__all__ = ["Operation", "Owner", "ReceivedTogether", "SentTogether", "finish_all", "wait_all", "words_of"]

_PACKET_BYTES = 1024
"""A message of at most so many bytes arrives whole or not at all."""

Key = tuple[Any, ...]
"""Identifies an operation: ``("send to", peer, tag, number)``, ``("recv from", peer, tag, number)``,
``("collective", ranks, number)``. The number counts operations that are otherwise alike, from 1.
"""


class Owner(Protocol):
    """The comm that an operation belongs to.

    Attributes:
        rank: this one.
        timeout: how long a wait may take.
        name: the same on all ranks, and of no other comm.
        waiters: the threads for waits that a failure does not end.
        collectives: those under way.
        errors: what to raise where an operation fails.
        launched: of each NCCL communicator the last message, which the device runs after all others.
    """

    rank: int
    timeout: timedelta
    name: str
    waiters: Waiters
    collectives: set[Operation]
    errors: OperationErrors
    launched: dict[RawGroup, Operation]


class Operation:
    """The handle of an operation under way, or of several messages that are one for their user. The last of
    them is waited for first (see `Comm.recv_together`).
    """

    __slots__ = ("_finish", "_pair", "_tensors", "_what", "_works", "comm", "key", "needs")

    def __init__(
        self,
        comm: Owner,
        works: Sequence[RawWork],
        key: Key,
        needs: Sequence[int],
        tensors: Sequence[torch.Tensor],
        finish: Callable[[], None] | None,
        pair: RawGroup | None = None,
        what: str = "",
    ) -> None:
        """``needs``: the ranks without whose part it can't end. ``pair``: the NCCL communicator of a message,
        for which the device waits and not the host. ``what``: the operation in words; empty for a message,
        whose words follow from ``key``.
        """
        self.comm = comm
        self._works: Sequence[RawWork] | None = works
        self.key = key
        self.needs = needs
        self._what = what
        self._tensors = tensors  # their memory is read or written until the wait is over
        self._finish = finish
        self._pair = pair

    @property
    def comm_name(self) -> str:
        """The name of the comm that it belongs to."""
        return self.comm.name

    @property
    def may_block_for_good(self) -> bool:
        """Whether a wait for it may block even after its connection has ended."""
        if self._works is None or self._pair is not None:
            return False
        if self.key[0] == "recv from":
            return self._tensors[-1].nbytes > _PACKET_BYTES
        return self.key[0] != "send to" or any(tensor.nbytes > _PACKET_BYTES for tensor in self._tensors)

    def wait(self) -> None:
        if self._works is None:
            return
        if self._pair is None:
            self.complete()
        elif self._tensors:
            try:
                for work in self._works:
                    work.wait()  # a timeout would make the host wait
            except RuntimeError as error:
                raise self.explained(error) from None
            self._tensors = ()  # later work on the device comes after it
            self.comm.launched[self._pair] = self
            self._finished()

    def complete(self) -> None:
        """Block until it is done, on the host or the device."""
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
        """Do what `wait` does for an operation that is known to have ended."""
        if self._pair is not None:
            self.wait()
        elif self._works is not None:
            self._block_here()

    def _block_here(self) -> None:
        try:
            self.block()
        except RuntimeError as error:
            raise self.explained(error) from None
        self.completed()

    def block(self) -> None:
        """Block until it is done, without the interpreter lock."""
        assert self._works is not None
        timeout = self.comm.timeout
        for work in reversed(self._works):
            work.wait(timeout)

    def completed(self) -> None:
        """Release what it refers to, once it is done."""
        self._works, self._tensors = None, ()
        if self._what:
            self.comm.collectives.discard(self)
        if self._finish is not None:
            self._finished()

    def flush(self, timeout: timedelta) -> None:
        """Wait for at most `timeout`; raise gloo's own RuntimeError, unexplained."""
        for work in self._works or ():
            work.wait(timeout)

    def explained(self, error: RuntimeError) -> ExecutionError:
        """Return what to raise for `error`, which has ended it. It is raised ``from None``: that a connection
        was reset is what came of the failure, and would be read as its reason.
        """
        return self.comm.errors.of_wait(error, self, self._what or words_of(self.key))

    def _finished(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


@dataclass(slots=True, eq=False)
class ReceivedTogether:
    """The handle of messages that are one for their user, where each has an operation of its own. The others
    have come when the last one has.
    """

    others: Sequence[Handle]
    last: Handle

    def wait(self) -> None:
        self.last.wait()
        finish_all(self.others)


@dataclass(slots=True, eq=False)
class SentTogether:
    """The handle of such messages at their sender."""

    handles: Sequence[Handle]

    def wait(self) -> None:
        wait_all(self.handles)


def wait_all(handles: Sequence[Handle]) -> None:
    """Wait for all of them; between processes that takes hardly longer than to wait for one."""
    if len(handles) == 1:
        handles[0].wait()
        return
    single = [one for it in handles for one in (it.handles if isinstance(it, SentTogether) else (it,))]
    blocking = [it for it in single if isinstance(it, Operation) and it.may_block_for_good]
    for comm in {id(it.comm): it.comm for it in blocking}.values():
        _complete(comm, [it for it in blocking if it.comm is comm])
    for handle in single:
        handle.wait()


def finish_all(handles: Iterable[Handle]) -> None:
    """Do what `wait_all` does for operations that are known to have ended: faster, but blind to failures."""
    for handle in handles:
        if isinstance(handle, Operation):
            handle.finish()
        elif isinstance(handle, SentTogether):
            finish_all(handle.handles)
        else:
            handle.wait()


def _complete(comm: Owner, operations: Sequence[Operation]) -> None:
    """Wait for them one after the other, in a thread that may stay behind after a failure."""
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
        raise current.explained(error) from None
    finally:
        WAITING.pop(thread, None)
    for operation in operations:
        operation.completed()


def words_of(key: Key) -> str:
    """Return a message's key in words."""
    way, peer, tag, _ = key
    return f"{way} rank {peer} (tag {tag})"
