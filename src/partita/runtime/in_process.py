"""All ranks in one process, one at a time: the comm for tests, for debugging, and for machines without a
network.

Each rank is a thread, but a baton decides which one runs. A rank keeps the baton until it must wait; then the
lowest-numbered rank that can go on gets it. So a run is the same every time, nothing races for torch's global
generator, and a deadlock is seen at once::

    rank 0  compute, send to 1, recv from 1 ─┐ (must wait)                    ┌─ goes on
    rank 1                                   └─ recv from 0, compute, send ───┘ (waits for something else, or
    ends)
"""

from __future__ import annotations

import contextvars
import pickle
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from partita.errors import ArgumentError, ExecutionError, SignatureMismatch
from partita.runtime._baton import Baton
from partita.runtime.comm import Handle, check_peer, check_ranks, check_tag, gather_through_rank_0

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
    """One tensor, and what each rank has in its place; none of them is kept alive here."""

    original: weakref.ref[torch.Tensor]
    by_rank: dict[int, weakref.ref[torch.Tensor]]


@dataclass
class _Board:
    """What is under way between the ranks."""

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
        """Calls ``fn(comm, *args)`` once for each rank and returns the results by rank.

        `args` are shared, not copied (but a stage that is built from a pipe has tensors of its rank's own:
        see `InProcessComm.own`). Each thread starts with the caller's grad mode, context variables, and
        number of threads for operators: some sum in another order with another number.

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
    """A handle: what to wait for, and what to raise if it went wrong."""

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
    """One rank's :class:`~partita.runtime.comm.Comm` in an :class:`InProcessWorld`, which makes it."""

    def __init__(self, baton: Baton, board: _Board, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._baton = baton
        self._board = board
        self._counts: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)

    @property
    def is_over(self) -> bool:
        """Whether the rank's function has returned: then nobody would answer."""
        return self._baton.has_ended(self.rank)

    def connect(self, pairs: Iterable[tuple[int, int]], device: torch.device | None = None) -> None:  # noqa: ARG002
        """Nothing to prepare."""
        self._check_usable()

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Handle:
        """As on a network, what arrives is the value at the time of the call or of the wait: do not change it
        between them.
        """
        check_peer(self.rank, self.size, dst)
        check_tag(tag)
        self._check_usable()
        message = _Message(tensor.detach().clone())
        self._board.sent[self.rank, dst, tag].append(message)
        self._match((self.rank, dst, tag))
        return _Wait(
            self._baton,
            self.rank,
            message,
            f"for rank {dst} to receive {_describe(tensor)} (tag {tag})",
            (dst,),
        )

    def recv(self, buffer: torch.Tensor, src: int, tag: int = 0) -> Handle:
        """Raises SignatureMismatch at the wait where message and buffer differ in shape or dtype."""
        check_peer(self.rank, self.size, src)
        check_tag(tag)
        self._check_usable()
        message = _Message(buffer.detach())
        self._board.wanted[src, self.rank, tag].append(message)
        self._match((src, self.rank, tag))
        return _Wait(
            self._baton,
            self.rank,
            message,
            f"to receive {_describe(buffer)} from rank {src} (tag {tag})",
            (src,),
        )

    def send_object(self, obj: Any, dst: int) -> None:
        check_peer(self.rank, self.size, dst)
        self._check_usable()
        self._board.objects[self.rank, dst].append(pickle.dumps(obj))

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
        """Sums in the order of the ranks."""
        return self._collective("all_reduce", tensor, check_ranks(self.rank, self.size, ranks), None)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Handle:
        if not 0 <= src < self.size:
            raise ArgumentError(f"no rank {src} here: this comm has ranks 0 to {self.size - 1}")
        return self._collective("broadcast", tensor, tuple(range(self.size)), src)

    def barrier(self) -> None:
        self.all_gather_object(None)

    def synchronize(self) -> None:
        """Nothing is left to wait for here."""

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's tensor in the place of one that the ranks of this process share, such as a parameter of
        a model that they have cut together: for the rank that asks first ``tensor`` itself, for every other
        one a copy of its own, the same each time.
        """
        copies = self._board.copies.get(id(tensor))
        if copies is None or copies.original() is not tensor:  # its id may be that of one that is gone
            copies = self._board.copies[id(tensor)] = _Copies(weakref.ref(tensor), {})
        known = copies.by_rank.get(self.rank)
        mine = None if known is None else known()
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
            f"rank {src} sent {_describe(message.tensor)}, but rank {dst} expects {_describe(buffer.tensor)} "
            f"(tag {tag}): give the receiver a buffer of the sender's shape and dtype"
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
            self._baton, self.rank, item, f"for {kind} over ranks {ranks}, with {_describe(tensor)}", others
        )


def _finish_collective(kind: str, item: _Reduction, src: int | None) -> None:
    item.done = True
    ordered = sorted(item.tensors.items())
    (first, model), *rest = ordered
    for rank, tensor in rest:
        if tensor.shape != model.shape or tensor.dtype != model.dtype:
            item.error = SignatureMismatch(
                f"{kind}: rank {first} brings {_describe(model)}, but rank {rank} {_describe(tensor)}: "
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
        return torch.nn.Parameter(value, tensor.requires_grad)
    return value.requires_grad_(tensor.requires_grad)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
