"""The interface between ranks: all that a runtime may ask of the network.

Two implementations ship: :class:`~partita.runtime.comms.process_group.ProcessGroupComm` (one process a rank,
over ``torch.distributed``) and :class:`~partita.runtime.comms.in_process.InProcessComm` (all ranks in one
process, one at a time). Code written for one runs on the other, and the same contract tests hold both to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch

from partita.errors import ArgumentError

__all__ = ["MAX_TAG", "Comm", "Handle", "check_peer", "check_ranks", "gather_through_rank_0"]

MAX_TAG = 2**31 - 17
"""The largest tag a caller may use; the few above it carry a comm's own messages."""


class Handle(Protocol):
    """An operation under way. Every handle must be waited for, or its data may never leave."""

    def wait(self) -> None:
        """Block until the operation is done: a received buffer is full, a sent tensor may be changed. For a
        tensor on a GPU the device's current stream waits, and the host goes on.

        Raises:
            PeerFailed: another rank raised, died or left, whether or not it is the one waited for.
        """
        ...


@runtime_checkable
class Comm(Protocol):
    """Ranks ``0 .. size - 1`` that pass tensors and small Python objects.

    Sends and receives start at once and end at their handle's ``wait()``. A send may be complete only once
    its receive has been posted (gloo, NCCL and the in-process comm all meet in that way), so start both
    before waiting for either.

    Messages with equal ``(src, dst, tag)`` arrive in the order in which they were sent; the two directions of
    a pair never block each other. On NCCL a tag selects nothing: sender and receiver of a pair start their
    messages in the same order.

    When a rank fails, every call and every ``wait()`` of every other rank raises
    :class:`~partita.errors.PeerFailed` within seconds. A comm is a context manager: leaving it by an
    exception publishes that exception, leaving it in the ordinary way closes it.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def connect(self, pairs: Iterable[tuple[int, int]], device: torch.device | None = None) -> None:
        """Prepare the directed pairs ``(src, dst)`` that will carry tensors. Collective: the same pairs on
        every rank.

        Args:
            device: where this rank's tensors are; None: on the current CUDA device, if at all.
        """
        ...

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Handle:
        """Start to send `tensor` (any dtype, shape and strides; no gradient flows). Leave it unchanged until
        ``wait()``.
        """
        ...

    def recv(self, buffer: torch.Tensor, src: int, tag: int = 0) -> Handle:
        """Start to fill `buffer`, whose shape and dtype must be those of the message."""
        ...

    def send_together(self, tensors: Sequence[torch.Tensor], dst: int, tags: Sequence[int]) -> Handle:
        """Start to send tensors in this order, each with a tag of its own; `recv_together` takes them."""
        ...

    def recv_together(self, buffers: Sequence[torch.Tensor], src: int, tags: Sequence[int]) -> Handle:
        """Start to fill `buffers`, contiguous ones without grad, with what `send_together` sends.

        The last one should have at most 1024 bytes: when it is here, so are the others, and it alone is
        waited for where connections can break (see ``partita.runtime.comms.waiters``).
        """
        ...

    def send_object(self, obj: Any, dst: int) -> None:
        """Send a small picklable object. It is copied at the call, and the call never waits for the
        receiver.
        """
        ...

    def recv_object(self, src: int) -> Any:
        """Return the next object from `src`; block until it is here. It is unpickled: peers are trusted."""
        ...

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, by rank. Collective."""
        ...

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Start to sum `tensor` in place over `ranks`; each of them calls it, with one shape and dtype."""
        ...

    def broadcast(self, tensor: torch.Tensor, src: int) -> Handle:
        """Start to overwrite every rank's `tensor` (any dtype) with that of `src`. Collective."""
        ...

    def barrier(self) -> None:
        """Block until every rank has called it."""
        ...

    def synchronize(self) -> None:
        """Block until all sends and receives that were waited for have ended on devices too, where one could
        still fail unseen.

        Raises:
            PeerFailed: another rank failed.
        """
        ...

    def fail(self, error: BaseException, where: str) -> None:
        """Publish that this rank has failed with `error` in `where`: the others get it as `PeerFailed`."""
        ...

    def close(self) -> None:
        """Leave without a failure. A rank that still waits for this one gets `PeerFailed`. Closing twice is
        fine.
        """
        ...

    def __enter__(self) -> Comm: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def check_peer(rank: int, size: int, peer: int, tag: int = 0) -> None:
    """Raise `ArgumentError` where `peer` is not another rank, or `tag` not in ``0 .. MAX_TAG``."""
    if not 0 <= peer < size:
        raise ArgumentError(f"no rank {peer} here: this comm has ranks 0 to {size - 1}")
    if peer == rank:
        raise ArgumentError(f"rank {rank} sends to itself: hand the value over without the comm")
    if not 0 <= tag <= MAX_TAG:
        raise ArgumentError(f"tag ({tag}) must lie between 0 and {MAX_TAG}")


def check_ranks(rank: int, size: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return `ranks` sorted; raise `ArgumentError` for an unknown, doubled or missing (`rank` itself) one."""
    ordered = tuple(sorted(ranks))
    if len(set(ordered)) != len(ordered) or not all(0 <= r < size for r in ordered):
        raise ArgumentError(f"ranks {ranks} must be distinct and lie between 0 and {size - 1}")
    if rank not in ordered:
        raise ArgumentError(f"rank {rank} calls a collective over {ranks}, to which it does not belong")
    return ordered


def gather_through_rank_0(comm: Comm, obj: Any) -> list[Any]:
    """Return every rank's object, by rank: rank 0 collects them and sends all to all. Collective."""
    if comm.rank != 0:
        comm.send_object(obj, 0)
        gathered: list[Any] = comm.recv_object(0)
        return gathered
    gathered = [obj, *(comm.recv_object(src) for src in range(1, comm.size))]
    for dst in range(1, comm.size):
        comm.send_object(gathered, dst)
    return gathered
