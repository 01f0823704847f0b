"""All ranks in one process, one at a time: the comm for tests, for debugging, and for machines without a
network.

Each rank is a thread, but a baton decides which one runs. A rank keeps the baton until it must wait; then the
lowest-numbered rank that can go on gets it. So a run is the same every time, nothing races for torch's global
generator, and a deadlock is seen at once::

    rank 0  compute, send to 1, recv from 1 ─┐ (must wait)                    ┌─ goes on
    rank 1                                   └─ recv from 0, compute, send ───┘ (must wait, or ends)
"""

from __future__ import annotations

import contextvars
import pickle
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from partita._torch.tensors.parameters import parameter_like
from partita._torch.tensors.tensor_text import tensor_text
from partita.errors import ArgumentError, ExecutionError, SignatureMismatch
from partita.runtime.comms._baton import Baton
from partita.runtime.comms._objects import pickled
from partita.runtime.comms._operation import ReceivedTogether, SentTogether
from partita.runtime.comms.comm import Handle, check_peer, check_ranks, gather_through_rank_0

__all__ = ["InProcessComm", "InProcessWorld"]

_Key = tuple[int, int, int]


@dataclass
class _Message:
    """One side of a transfer, until the other side comes."""

    tensor: torch.Tensor
    matched: bool = False
    error: SignatureMismatch | None = None


@dataclass
class _Reduction:
    """One all_reduce or broadcast: the tensors of the ranks that have come so far."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    done: bool = False
    error: SignatureMismatch | None = None


@dataclass
class _Copies:
    """One shared tensor, and each rank's own copy of it; neither is kept alive here."""

    original: weakref.ref[torch.Tensor]
    by_rank: dict[int, weakref.ref[torch.Tensor]]


@dataclass
class _Board:
    """The messages and collectives under way between the ranks."""

    sent: dict[_Key, deque[_Message]] = field(default_factory=lambda: defaultdict(deque))
    wanted: dict[_Key, deque[_Message]] = field(default_factory=lambda: defaultdict(deque))
    objects: dict[tuple[int, int], deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    collectives: dict[tuple[str, tuple[int, ...], int], _Reduction] = field(
        default_factory=lambda: defaultdict(_Reduction)
    )
    copies: dict[int, _Copies] = field(default_factory=dict)


class InProcessWorld:
    """`size` ranks in this process.

    >>> def add_ranks(comm):
    ...     total = torch.tensor(float(comm.rank))
    ...     comm.all_reduce(total, tuple(range(comm.size))).wait()
    ...     return total.item()
    >>> InProcessWorld(3).run(add_ranks)
    [3.0, 3.0, 3.0]
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ArgumentError(f"a world has at least one rank, not {size}")
        self.size = size

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(comm, *args)`` once for each rank and return the results by rank.

        `args` are shared, not copied (but a stage that is built from a pipe has its rank's own tensors, see
        `InProcessComm.own`). Each rank starts with the caller's grad mode, context variables, and number of
        threads for operators, on which the order of some sums depends.

        Raises:
            DeadlockError: every rank that has not ended waits for another.
            BaseException: whatever the first rank to fail raised; the others got PeerFailed.
        """
        baton, board = Baton(self.size), _Board()
        results: list[Any] = [None] * self.size
        grad, threads = torch.is_grad_enabled(), torch.get_num_threads()

        def body(rank: int) -> None:
            baton.take(rank)
            try:
                torch.set_num_threads(threads)  # new threads start with the machine's
                with torch.set_grad_enabled(grad):
                    results[rank] = fn(InProcessComm(baton, board, rank, self.size), *args)
            except BaseException as error:
                baton.fail(rank, error, "its function")
            baton.end(rank)

        for rank in range(self.size):
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(body, rank), name=f"rank {rank}", daemon=True).start()
        baton.start()
        try:
            baton.join()
        except KeyboardInterrupt as stop:  # the running rank unwinds at its next call
            baton.fail(0, stop, "the caller of run()")
            raise
        if baton.original is not None:
            raise baton.original
        return results


@dataclass(frozen=True)
class _Wait:
    """The handle of a message or collective."""

    baton: Baton
    rank: int
    item: _Message | _Reduction
    what: str
    needs: tuple[int, ...]

    def wait(self) -> None:
        item = self.item
        done = (lambda: item.matched) if isinstance(item, _Message) else (lambda: item.done)
        self.baton.wait(self.rank, done, self.what, self.needs)
        if item.error is not None:
            raise item.error


class InProcessComm:
    """One rank's :class:`~partita.runtime.comms.comm.Comm` in an :class:`InProcessWorld`, which makes it."""

    def __init__(self, baton: Baton, board: _Board, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._baton = baton
        self._board = board
        self._counts: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)

    @property
    def is_over(self) -> bool:
        """Whether the rank's function has returned."""
        return self._baton.has_ended(self.rank)

    def connect(self, pairs: Iterable[tuple[int, int]], device: torch.device | None = None) -> None:  # noqa: ARG002
        """Do nothing: there is nothing to prepare."""
        self._check_usable()

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Handle:
        """Start to send `tensor`. As on a network, its value at the call or at the wait arrives: do not
        change it in between.
        """
        check_peer(self.rank, self.size, dst, tag)
        self._check_usable()
        message = _Message(tensor.detach().clone())
        self._board.sent[self.rank, dst, tag].append(message)
        self._match((self.rank, dst, tag))
        return _Wait(
            self._baton,
            self.rank,
            message,
            f"for rank {dst} to receive {tensor_text(tensor)} (tag {tag})",
            (dst,),
        )

    def recv(self, buffer: torch.Tensor, src: int, tag: int = 0) -> Handle:
        """Start to fill `buffer`; the wait raises `SignatureMismatch` for another shape or dtype."""
        check_peer(self.rank, self.size, src, tag)
        self._check_usable()
        message = _Message(buffer.detach())
        self._board.wanted[src, self.rank, tag].append(message)
        self._match((src, self.rank, tag))
        return _Wait(
            self._baton,
            self.rank,
            message,
            f"to receive {tensor_text(buffer)} from rank {src} (tag {tag})",
            (src,),
        )

    def send_together(self, tensors: Sequence[torch.Tensor], dst: int, tags: Sequence[int]) -> Handle:
        return SentTogether([self.send(tensor, dst, tag) for tensor, tag in zip(tensors, tags, strict=True)])

    def recv_together(self, buffers: Sequence[torch.Tensor], src: int, tags: Sequence[int]) -> Handle:
        *others, last = [self.recv(to, src, tag) for to, tag in zip(buffers, tags, strict=True)]
        return ReceivedTogether(others, last)

    def send_object(self, obj: Any, dst: int) -> None:
        check_peer(self.rank, self.size, dst)
        self._check_usable()
        self._board.objects[self.rank, dst].append(pickled(obj))

    def recv_object(self, src: int) -> Any:
        check_peer(self.rank, self.size, src)
        self._check_usable()
        queue = self._board.objects[src, self.rank]
        self._baton.wait(self.rank, lambda: bool(queue), f"to receive an object from rank {src}", (src,))
        return pickle.loads(queue.popleft())

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._check_usable()
        return gather_through_rank_0(self, obj)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Sum in the order of the ranks."""
        return self._collective("all_reduce", tensor, check_ranks(self.rank, self.size, ranks), None)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Handle:
        if not 0 <= src < self.size:
            raise ArgumentError(f"no rank {src} here: this comm has ranks 0 to {self.size - 1}")
        return self._collective("broadcast", tensor, tuple(range(self.size)), src)

    def barrier(self) -> None:
        self.all_gather_object(None)

    def synchronize(self) -> None:
        """Do nothing: every wait has ended its operation."""

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's own version of a tensor that all ranks share, such as a parameter of the model
        that they cut: ``tensor`` itself for the rank that asks first, and a copy for each other one, the same
        each time.
        """
        copies = self._board.copies.get(id(tensor))
        if copies is None or copies.original() is not tensor:  # its id may be that of one that is gone
            copies = self._board.copies[id(tensor)] = _Copies(weakref.ref(tensor), {})
        reference = copies.by_rank.get(self.rank)
        mine = None if reference is None else reference()
        if mine is None:
            mine = _copied(tensor) if copies.by_rank else tensor
            copies.by_rank[self.rank] = weakref.ref(mine)
        return mine

    def fail(self, error: BaseException, where: str) -> None:
        self._baton.fail(self.rank, error, where)

    def close(self) -> None:
        self._baton.close(self.rank)

    def __enter__(self) -> InProcessComm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error, "the comm's with block")
        self.close()

    def _check_usable(self) -> None:
        if self.is_over:
            raise ExecutionError(
                f"rank {self.rank} of an InProcessWorld has ended, and its comm is used: communicate in the "
                "function that run() calls"
            )
        self._baton.check(self.rank)
        if self._baton.is_closed(self.rank):
            raise ExecutionError(f"rank {self.rank} uses a comm that it has closed: make a new one")

    def _match(self, key: _Key) -> None:
        sent, wanted = self._board.sent[key], self._board.wanted[key]
        if not (sent and wanted):
            return
        message, buffer = sent.popleft(), wanted.popleft()
        message.matched = buffer.matched = True
        if message.tensor.shape == buffer.tensor.shape and message.tensor.dtype == buffer.tensor.dtype:
            buffer.tensor.copy_(message.tensor)
            return
        src, dst, tag = key
        buffer.error = SignatureMismatch(
            f"rank {src} sent {tensor_text(message.tensor)}, but rank {dst} expects "
            f"{tensor_text(buffer.tensor)} (tag {tag}): "
            "give the receiver a buffer of the sender's shape and dtype"
        )

    def _collective(self, kind: str, tensor: torch.Tensor, ranks: tuple[int, ...], src: int | None) -> Handle:
        self._check_usable()
        self._counts[kind, ranks] += 1
        item = self._board.collectives[kind, ranks, self._counts[kind, ranks]]
        item.tensors[self.rank] = tensor.detach()
        if len(item.tensors) == len(ranks):
            _finish_collective(kind, item, src)
        others = tuple(rank for rank in ranks if rank != self.rank and rank not in item.tensors)
        return _Wait(
            self._baton, self.rank, item, f"for {kind} over ranks {ranks}, with {tensor_text(tensor)}", others
        )


def _finish_collective(kind: str, item: _Reduction, src: int | None) -> None:
    item.done = True
    ordered = sorted(item.tensors.items())
    (first, model), *rest = ordered
    for rank, tensor in rest:
        if tensor.shape != model.shape or tensor.dtype != model.dtype:
            item.error = SignatureMismatch(
                f"{kind}: rank {first} brings {tensor_text(model)}, but rank {rank} {tensor_text(tensor)}: "
                "all ranks must bring the same shape and dtype"
            )
            return
    result = model.clone() if src is None else item.tensors[src].clone()
    if src is None:
        for _, tensor in rest:
            result += tensor
    for _, tensor in ordered:
        tensor.copy_(result)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return parameter_like(tensor, value)
    return value.requires_grad_(tensor.requires_grad)
