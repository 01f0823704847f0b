"""The comm of real runs: one process a rank, over ``torch.distributed`` (gloo for CPU tensors, NCCL for CUDA
tensors).

All groups are the comm's own (see :mod:`~partita.runtime.own_groups`); the user's are read for rank, size and
store, and never used or destroyed.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from partita._torch.distributed import RawGroup, RawWork, Store, all_reduce_sum, group_store, prefixed
from partita.errors import ExecutionError
from partita.runtime._objects import HEADER_BYTES, as_tensor, pack, rest_bytes, unpack
from partita.runtime._operation import Operation, message_words
from partita.runtime._staging import as_bytes, copied_back, staged_for_receiving, staged_for_sending
from partita.runtime.comm import MAX_TAG, Handle, check_peer, check_ranks, check_tag, gather_through_rank_0
from partita.runtime.failure import FailureRecord, Lookout, announce
from partita.runtime.own_groups import OwnGroups

__all__ = ["ProcessGroupComm"]

_CPU = torch.device("cpu")
_OBJECT_TAG = MAX_TAG + 1
_MAX_UNSENT = 1000
_CLOSE_GRACE_S = 5.0
_EXIT_GRACE_S = 2.0
"""A process that ends without close() is a failure to those who still need it after so long, and they must
hear of it within 5 s."""
_SLOW = ("Timed out", "timing out")
"""What gloo and NCCL say when an operation takes longer than it may."""
_TELL_S = 2.0
"""So long a process that ends after a failure waits for those who have not heard of it yet: it may be the one
that hosts the store."""


class ProcessGroupComm:
    """A :class:`~partita.runtime.comm.Comm` over processes. Made by :meth:`from_group`.

    Calls come from one thread. `size`, `rank` and every `src`, `dst` are ranks within the group it was made
    from.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, use_nccl: bool) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timedelta(seconds=timeout_s)
        self._use_nccl = use_nccl
        self._closed = False
        self._process = os.getpid()
        self._groups = OwnGroups(store, rank, size, timeout_s, self._check_usable)
        self._unsent: deque[Operation] = deque()
        self._launched: dict[RawGroup, Operation] = {}
        announce(store, rank)
        watch = self._groups.of_all("watch") if size > 1 else None
        self._data = self._groups.of_all("data")
        self._lookout = Lookout(store.clone(), rank, size, watch, self._groups.abort)
        self._lookout.start()
        atexit.register(self._at_exit)
        # multiprocessing ends its children with os._exit(), without atexit; but it calls this.
        self._child_exit = Finalize(None, self._at_exit, exitpriority=0)

    @classmethod
    def from_group(
        cls, group: dist.ProcessGroup | None = None, *, timeout_s: float = 1800.0
    ) -> ProcessGroupComm:
        """A comm over the ranks of `group` (None: the default group). Collective over that group.

        Args:
            timeout_s: seconds that a ``wait()`` may take while all ranks are alive. A failure is known long
                before.

        Raises:
            ValueError: there is no default group, or this process is not in `group`.
            ExecutionError: the ranks could not be connected.
        """
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        if rank < 0:
            raise ValueError("this process is not a member of the group: make the comm on its members only")
        store = group_store(group)
        size = dist.get_world_size(group)
        # All members make their comms on a group in the same order, so each one's own count names the comm.
        number = store.add(f"partita/comms/{rank}", 1)
        try:
            own = prefixed(store, f"partita/comm/{number}")
            comm = cls(own, rank, size, timeout_s, "nccl" in dist.get_backend(group))
        except RuntimeError as error:
            raise ExecutionError(
                f"rank {rank} could not be connected with all of the {size} ranks: {error}\n"
                "See that every rank makes the comm, and that GLOO_SOCKET_IFNAME names a network interface "
                "that all hosts share"
            ) from error
        comm.barrier()  # a rank that has nothing to say must not leave while others still connect to it
        return comm

    def connect(self, pairs: Iterable[tuple[int, int]], device: torch.device | None = None) -> None:
        """On NCCL, opens one communicator for each directed pair; gloo is connected already."""
        self._check_usable()
        if not self._use_nccl:
            return
        probe = torch.zeros(1, device=device or "cuda")
        if not self._on_nccl(probe):
            return
        for src, dst in sorted(set(pairs)):
            if self.rank in {src, dst}:
                (self.send(probe, dst) if self.rank == src else self.recv(probe, src)).wait()
        self.settle()

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Handle:
        check_peer(self.rank, self.size, dst)
        check_tag(tag)
        return self._send(tensor, dst, tag)

    def recv(self, buffer: torch.Tensor, src: int, tag: int = 0) -> Handle:
        check_peer(self.rank, self.size, src)
        check_tag(tag)
        return self._recv(buffer, src, tag)

    def send_object(self, obj: Any, dst: int) -> None:
        check_peer(self.rank, self.size, dst)
        self._unsent.extend(self._send(as_tensor(message), dst, _OBJECT_TAG) for message in pack(obj))
        while len(self._unsent) > _MAX_UNSENT:
            self._unsent.popleft().wait()

    def recv_object(self, src: int) -> Any:
        check_peer(self.rank, self.size, src)
        header = bytearray(HEADER_BYTES)
        self._recv(as_tensor(header), src, _OBJECT_TAG).wait()
        rest = bytearray(rest_bytes(header))
        if rest:
            self._recv(as_tensor(rest), src, _OBJECT_TAG).wait()
        return unpack(header, rest)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Through rank 0, which sends the list to all."""
        self._check_usable()
        return gather_through_rank_0(self, obj)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        members = check_ranks(self.rank, self.size, ranks)
        peer = next((r for r in members if r != self.rank), self.rank)
        self._check_usable()
        on_nccl = self._on_nccl(tensor)
        group = self._groups.collective(members, nccl=on_nccl)
        # gloo sums every dtype but int16.
        dtype = torch.int32 if tensor.dtype == torch.int16 else tensor.dtype
        staged = staged_for_sending(tensor, dtype, tensor.device if on_nccl else _CPU)
        post = partial(all_reduce_sum, group, staged)
        return self._start(
            post, peer, f"all_reduce over ranks {members}", staged, copied_back(tensor, staged)
        )

    def broadcast(self, tensor: torch.Tensor, src: int) -> Handle:
        if not 0 <= src < self.size:
            raise ValueError(f"no rank {src} here: this comm has ranks 0 to {self.size - 1}")
        self._check_usable()
        on_nccl = self._on_nccl(tensor)
        group = self._groups.collective(tuple(range(self.size)), nccl=on_nccl)
        staged = staged_for_sending(tensor, tensor.dtype, tensor.device if on_nccl else _CPU)
        post = partial(group.broadcast, staged, src)
        peer = src if src != self.rank else (src + 1) % self.size
        return self._start(post, peer, f"broadcast from rank {src}", staged, copied_back(tensor, staged))

    def barrier(self) -> None:
        self.all_gather_object(None)

    def settle(self) -> None:
        """Waits for the last message of each NCCL communicator; over gloo there is nothing left to wait
        for.
        """
        if self._launched:
            self._check_usable()
        while self._launched:
            _, last = self._launched.popitem()
            last.settle()

    def note_launched(self, pair: RawGroup, operation: Operation) -> None:
        """The device will come to it after all earlier ones of that communicator."""
        self._launched[pair] = operation

    def fail(self, error: BaseException, where: str) -> None:
        """Publishes `error` and ends all of this rank's operations. The first failure of all ranks is the one
        that counts.
        """
        if self._is_own:
            self._lookout.publish(FailureRecord.of(self.rank, error, where))

    def close(self) -> None:
        """Waits a few seconds for the others to close too, so that whoever hosts the store does not pull it
        away.
        """
        if self._closed:
            return
        self._closed = True
        self._forget_exit()
        if not self._is_own:
            return
        if self._lookout.failure is None:
            self._flush_objects()
            self._lookout.leave()
            self._groups.abort()
            self._lookout.wait_until_all_left(_CLOSE_GRACE_S)
        self._stop_lookout()
        self._groups.made.clear()
        self._launched.clear()

    def __enter__(self) -> ProcessGroupComm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not self._closed:
            self.fail(error, "the comm's with block")
        self.close()

    # Starting and ending operations.

    def _on_nccl(self, tensor: torch.Tensor) -> bool:
        return self._use_nccl and tensor.is_cuda

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Operation:
        self._check_usable()
        pair = self._groups.pair(self.rank, dst) if self._on_nccl(tensor) else None
        staged = staged_for_sending(tensor, tensor.dtype, _CPU if pair is None else tensor.device)
        try:
            if pair is None:
                work = self._data.send([staged], dst, tag)
            else:
                work = pair.send([as_bytes(staged)], 1, tag)
        except RuntimeError as error:
            raise self.explain(error, dst, message_words("send to", dst, tag)) from error
        return Operation(self, work, dst, ("send to", dst, tag), staged, None, pair)

    def _recv(self, buffer: torch.Tensor, src: int, tag: int) -> Operation:
        self._check_usable()
        pair = self._groups.pair(src, self.rank) if self._on_nccl(buffer) else None
        staged = staged_for_receiving(buffer, _CPU if pair is None else buffer.device)
        finish = copied_back(buffer, staged)
        try:
            if pair is None:
                work = self._data.recv([staged], src, tag)
            else:
                work = pair.recv([as_bytes(staged)], 0, tag)
        except RuntimeError as error:
            raise self.explain(error, src, message_words("recv from", src, tag)) from error
        return Operation(self, work, src, ("recv from", src, tag), staged, finish, pair)

    def _start(
        self,
        post: Callable[[], RawWork],
        peer: int,
        what: str,
        tensor: torch.Tensor,
        finish: Callable[[], None] | None,
    ) -> Operation:
        try:
            return Operation(self, post(), peer, what, tensor, finish)
        except RuntimeError as error:
            raise self.explain(error, peer, what) from error

    def _check_usable(self) -> None:
        if self._lookout.failure is not None:
            raise self._lookout.failure.to_error()
        if self._closed:
            raise ExecutionError(f"rank {self.rank} uses a comm that it has closed: make a new one")

    # Failure.

    def explain(self, error: RuntimeError, peer: int, what: str) -> ExecutionError:
        """What to raise for `error`, which ended an operation with `peer`. Tells the other ranks too."""
        if not any(words in str(error) for words in _SLOW):
            return self._lookout.explain(peer).to_error()
        if self._lookout.failure is not None:
            return self._lookout.failure.to_error()
        slow = ExecutionError(
            f"rank {self.rank} waited {self.timeout.total_seconds():g} s in {what}, and rank {peer}, "
            "though alive, did not answer: see that both sides take part, or give "
            "ProcessGroupComm.from_group a larger timeout_s"
        )
        self.fail(slow, what)
        return slow

    def _flush_objects(self) -> None:
        """Lets objects that a slower peer has yet to receive leave; gives up on those that nobody wants."""
        try:
            for operation in self._unsent:
                operation.flush(timedelta(seconds=_CLOSE_GRACE_S))
        except RuntimeError:
            return

    def _at_exit(self) -> None:
        """The process ends with the comm open. An exception that ends it is a failure to the others at
        once. Else it leaves, and where others have not left too within seconds, that is a failure to them.

        In a process of multiprocessing's that goes for ``sys.exit(3)`` too. At the top of a script it looks
        like an ordinary end: Python drops the SystemExit, and its code, before it calls anybody. There, only
        a ``with`` block around the training sees it.
        """
        self._forget_exit()
        if not self._is_own:
            return
        error = sys.exception() or getattr(sys, "last_value", None)
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.fail(error, "the main program")
        elif self._lookout.failure is None:
            self._flush_objects()
            self._lookout.leave()
            if not self._lookout.wait_until_all_left(_EXIT_GRACE_S):
                self._lookout.publish(FailureRecord(self.rank, "left"))
        self._stop_lookout()

    @property
    def _is_own(self) -> bool:
        """Not so in a child that the rank has forked: that one speaks for nobody."""
        return os.getpid() == self._process

    def _forget_exit(self) -> None:
        atexit.unregister(self._at_exit)
        self._child_exit.cancel()

    def _stop_lookout(self) -> None:
        if self._lookout.failure is not None:
            self._lookout.wait_until_all_know(_TELL_S)
        self._lookout.stop()
