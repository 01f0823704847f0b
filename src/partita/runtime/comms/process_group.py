"""The comm of real runs: one process a rank, over ``torch.distributed`` (gloo on CPUs, NCCL on GPUs).

All groups are the comm's own (see :mod:`~partita.runtime.comms.own_groups`); the user's are read for rank,
size and store, and never used or destroyed.
"""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from partita._torch.distributed.groups import (
    RawGroup,
    RawWork,
    Store,
    all_reduce_sum,
    group_store,
    group_timeout,
    is_of_parent,
    prefixed,
    world_number,
)
from partita.errors import ArgumentError, ExecutionError
from partita.runtime.comms._objects import HEADER_BYTES, as_tensor, pack, rest_bytes, unpack
from partita.runtime.comms._operation import Operation, wait_all
from partita.runtime.comms._staging import as_bytes
from partita.runtime.comms._starter import Starter
from partita.runtime.comms.comm import MAX_TAG, Handle, check_peer, check_ranks, gather_through_rank_0
from partita.runtime.comms.group_or_comm import check_group
from partita.runtime.comms.left_open import close_after, close_left_open
from partita.runtime.comms.operation_errors import OperationErrors
from partita.runtime.comms.own_groups import OwnGroups
from partita.runtime.comms.rendezvous import meet_all
from partita.runtime.comms.waiters import Waiters
from partita.runtime.failures.ending import ending_error, see_how_child_ends
from partita.runtime.failures.failure import FailureRecord
from partita.runtime.failures.failure_detector import FailureDetector, Team
from partita.runtime.failures.interruptible import interruptible
from partita.runtime.failures.stalls import STALLS

__all__ = ["ProcessGroupComm"]

_OBJECT_TAG = MAX_TAG + 1
_MEET_TAG = MAX_TAG + 2
_MAX_UNSENT = 1000
_CLOSE_GRACE_S = 5.0
_EXIT_GRACE_S = 2.0
LOST_AFTER_S = 15.0
"""Seconds without an answer after which another host counts as lost, by default."""


class ProcessGroupComm:
    """A :class:`~partita.runtime.comms.comm.Comm` over processes. Made by :meth:`from_group`.

    Only one thread may call it. All ranks are numbers within the group that it was made from.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        use_nccl: bool,
        *,
        name: str = "",
        processes: tuple[int, ...] = (),
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timedelta(seconds=timeout_s)
        self.name = name or f"unnamed {id(self)}"
        self._closed = False
        self._process = os.getpid()
        self._unsent: deque[Operation] = deque()
        self.waiters = Waiters()
        self.collectives: set[Operation] = set()
        self.launched: dict[RawGroup, Operation] = {}
        self.processes = processes or tuple(range(size))
        team = Team(self.name, rank, self.processes, lost_after_s)
        self._detector = FailureDetector(team, *meet_all(store, team, timeout_s), self._abort)
        self.errors = OperationErrors(self._detector, timeout_s, self.fail)
        self._groups = OwnGroups(
            store, rank, size, timeout_s, self._check_usable, self._meet, self.errors.of_connection
        )
        self._starter = Starter(self, self._groups, self._detector, self._check_usable, use_nccl=use_nccl)
        self._detector.start()
        try:
            self._starter.data = self._groups.of_all("data")
        except BaseException as error:
            self.fail(error, "connecting")
            self._detector.stop()
            raise
        atexit.register(self._at_exit)
        # multiprocessing ends its children with os._exit(), without atexit; but it calls this.
        self._child_exit = Finalize(None, self._at_exit, exitpriority=0)
        see_how_child_ends()

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float | None = None,
        lost_after_s: float = LOST_AFTER_S,
    ) -> ProcessGroupComm:
        """Return a comm over the ranks of `group` (None: the default group). Collective over that group.

        Args:
            timeout_s: seconds that a ``wait()``, or making the comm, may take while all ranks are alive;
                None: the timeout that the group was made with (``init_process_group(timeout=...)``, 30
                minutes if not given). A failure is known long before.
            lost_after_s: seconds, at least 3, after which a host that does not answer the kernel's probes
                counts as lost, whatever its processes do.

        Raises:
            ArgumentError: there is no default group, this process is not in `group`, that is no process
                group, or a limit is too small.
            SignatureMismatch: the other ranks make a comm for another call.
            DeadlockError: the other ranks wait for this one elsewhere.
            PeerFailed: another rank ended before it came.
            ExecutionError: the ranks could not be connected, or some did not come in time; or a forked child
                has the group from its parent.
        """
        # A group of several processes, which this one is a member of.
        check_group(group, "process_group")
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        if rank < 0:
            raise ArgumentError(
                "this process is not a member of the group: make the comm on its members only"
            )
        if dist.is_initialized() and "fake" in dist.get_backend(group):
            raise ArgumentError(
                "the group's backend is 'fake', which sends nothing: several ranks run in one process with "
                "partita.runtime.InProcessWorld(ranks).run(body), which gives each a comm; or call "
                "torch.distributed.destroy_process_group() first, to work without other ranks"
            )
        if is_of_parent():
            raise ExecutionError(_forked_by(rank))
        if lost_after_s < 3:
            raise ArgumentError(f"lost_after_s is {lost_after_s:g}: give at least 3 seconds")
        # Ranks meet at the group's store, under a name that no other comm has.
        if timeout_s is None:
            timeout_s = group_timeout(group).total_seconds()
        size = dist.get_world_size(group)
        STALLS.in_world(world_number())
        processes = tuple(dist.get_process_group_ranks(group))
        try:
            store = interruptible(partial(group_store, group), timeout_s, "connecting with the store")
            # All members make their comms on a group in the same order: each rank's own count names the comm.
            count = partial(store.add, f"partita/comms/{rank}", 1)
            number = interruptible(count, timeout_s, "asking the store")
            prefix = f"partita/comm/{number}"
            use_nccl = "nccl" in dist.get_backend(group)
            options = {
                "name": f"{prefix} of {processes}",
                "processes": processes,
                "lost_after_s": lost_after_s,
            }
            comm = cls(prefixed(store, prefix), rank, size, timeout_s, use_nccl, **options)  # type: ignore[arg-type]
        except ExecutionError:
            raise
        except RuntimeError as error:
            raise ExecutionError(
                f"rank {rank} could not be connected with all of the {size} ranks: {error}\n"
                "See that every rank makes the comm, and that GLOO_SOCKET_IFNAME names a network interface "
                "that all hosts share"
            ) from error
        comm.barrier()  # a rank that has nothing to say must not leave while others still connect to it
        close_left_open(processes)
        return comm

    def used_by(self, user: object) -> ProcessGroupComm:
        """Close by itself when ``user``, the only one, is gone and all ranks have met for another comm.

        Returns:
            The comm itself.
        """
        close_after(user, self)
        return self

    def connect(self, pairs: Iterable[tuple[int, int]], device: torch.device | None = None) -> None:
        """On NCCL, open one communicator for each directed pair; gloo is connected already."""
        self._check_usable()
        if not self._starter.use_nccl:
            return
        probe = torch.zeros(1, device=device or "cuda")
        if not self._starter.on_nccl(probe):
            return
        for src, dst in sorted(set(pairs)):
            if self.rank in {src, dst}:
                (self.send(probe, dst) if self.rank == src else self.recv(probe, src)).wait()
        self.synchronize()

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Handle:
        check_peer(self.rank, self.size, dst, tag)
        return self._starter.send(tensor, dst, tag)

    def recv(self, buffer: torch.Tensor, src: int, tag: int = 0) -> Handle:
        check_peer(self.rank, self.size, src, tag)
        return self._starter.recv(buffer, src, tag)

    def send_together(self, tensors: Sequence[torch.Tensor], dst: int, tags: Sequence[int]) -> Handle:
        check_peer(self.rank, self.size, dst, tags[-1])
        return self._starter.send_together(tensors, dst, tags)

    def recv_together(self, buffers: Sequence[torch.Tensor], src: int, tags: Sequence[int]) -> Handle:
        check_peer(self.rank, self.size, src, tags[-1])
        return self._starter.recv_together(buffers, src, tags)

    def send_object(self, obj: Any, dst: int) -> None:
        check_peer(self.rank, self.size, dst)
        self._unsent.extend(self._starter.send(as_tensor(message), dst, _OBJECT_TAG) for message in pack(obj))
        while len(self._unsent) > _MAX_UNSENT:
            self._unsent.popleft().wait()

    def recv_object(self, src: int) -> Any:
        check_peer(self.rank, self.size, src)
        header = bytearray(HEADER_BYTES)
        self._starter.recv(as_tensor(header), src, _OBJECT_TAG).wait()
        rest = bytearray(rest_bytes(header))
        if rest:
            self._starter.recv(as_tensor(rest), src, _OBJECT_TAG).wait()
        return unpack(header, rest)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather through rank 0, which sends the list to all."""
        self._check_usable()
        return gather_through_rank_0(self, obj)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        members = check_ranks(self.rank, self.size, ranks)
        needs = tuple(member for member in members if member != self.rank)
        # gloo sums every dtype but int16.
        dtype = torch.int32 if tensor.dtype == torch.int16 else tensor.dtype
        what = f"all_reduce over ranks {members}"
        return self._starter.collective(all_reduce_sum, tensor, dtype, members, needs, what)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Handle:
        if not 0 <= src < self.size:
            raise ArgumentError(f"no rank {src} here: this comm has ranks 0 to {self.size - 1}")
        members = tuple(range(self.size))
        needs = (src,)
        if src == self.rank:  # along a tree, whose first branches are these
            needs = tuple((src + 2**step) % self.size for step in range((self.size - 1).bit_length()))

        def post(group: RawGroup, staged: torch.Tensor) -> RawWork:
            return group.broadcast(as_bytes(staged), src)

        return self._starter.collective(
            post, tensor, tensor.dtype, members, needs, f"broadcast from rank {src}"
        )

    def barrier(self) -> None:
        self.all_gather_object(None)

    def synchronize(self) -> None:
        """Wait for the last message of each NCCL communicator; over gloo all have ended already."""
        if self.launched:
            self._check_usable()
        while self.launched:
            self.launched.popitem()[1].complete()

    @property
    def has_failed(self) -> bool:
        """Whether the comm can't be used any more: a rank has failed, or it is closed."""
        return self._closed or self._detector.failure is not None

    def fail(self, error: BaseException, where: str) -> None:
        """Publish `error` and end all of this rank's operations. Of several failures the first counts."""
        if self._is_own:
            self._detector.publish(FailureRecord.of(self.rank, error, where))

    def close(self) -> None:
        """Wait a few seconds for the others to close too, so that the store stays up until all are done."""
        self._close(_CLOSE_GRACE_S)

    def release(self) -> None:
        """Close without waiting for the others, which need not know that this rank is done with it."""
        self._close(0.0)

    def _close(self, grace_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._forget_exit()
        if not self._is_own:
            return
        if self._detector.failure is None:
            self._flush_objects()
            self._detector.leave(ending=False)
            self._groups.abort()
            self._detector.wait_until_all_left(grace_s)
        self._detector.stop()
        self._end_waits()
        self._groups.by_name.clear()
        self.launched.clear()
        del self._starter.data  # a group's thread ends with it, and not when the collector comes

    def __enter__(self) -> ProcessGroupComm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not self._closed:
            self.fail(error, "the comm's with block")
        self.close()

    # Helpers.

    def _meet(self, members: tuple[int, ...]) -> None:
        """Return when all `members` have called it."""
        others = [member for member in members if member != self.rank]
        token = torch.zeros(1, dtype=torch.uint8)
        handles = [self._starter.send(token, other, _MEET_TAG) for other in others]
        handles += [self._starter.recv(torch.empty_like(token), other, _MEET_TAG) for other in others]
        wait_all(handles)

    def _check_usable(self) -> None:
        if self._detector.failure is not None:
            raise self._detector.failure.to_error()
        if self._closed:
            raise ExecutionError(f"rank {self.rank} uses a comm that it has closed: make a new one")
        if os.getpid() != self._process:
            raise ExecutionError(_forked_by(self.rank))

    # Failure.

    def _abort(self) -> None:
        """End whatever this rank waits for."""
        try:
            self._groups.abort()
        finally:
            self.waiters.release()

    def _end_waits(self) -> None:
        """End the threads, which keep the groups: to destroy a group in which something runs would block."""
        running = [operation.block for operation in self.collectives]
        self.waiters.end(running, kept=list(self._groups.by_name.values()))
        self.collectives.clear()

    def _flush_objects(self) -> None:
        """Wait until slower peers have received their objects, for a few seconds."""
        with suppress(RuntimeError):
            for operation in self._unsent:
                operation.flush(timedelta(seconds=_CLOSE_GRACE_S))

    def _at_exit(self) -> None:
        """Leave where the process ends before the comm is closed; publish the exception that ends it, if any.
        (One that `ending_error` can't see only a ``with`` block around the training sees.)
        """
        self._forget_exit()
        if not self._is_own:
            return
        error = ending_error()
        if error is not None:
            self.fail(error, "the main program")
        elif self._detector.failure is None:
            self._flush_objects()
            self._detector.leave(ending=True)
            self._detector.wait_until_all_left(_EXIT_GRACE_S)
        self._detector.stop()
        self._end_waits()

    @property
    def _is_own(self) -> bool:
        """Whether this is the process that made the comm, and not a child that it has forked: to use the
        connections that both share would end the parent.
        """
        return os.getpid() == self._process

    def _forget_exit(self) -> None:
        atexit.unregister(self._at_exit)
        self._child_exit.cancel()


def _forked_by(rank: int) -> str:
    return (
        f"process {os.getpid()} was forked by rank {rank} and is not that rank: run steps and collective "
        "calls in the process that called init_process_group(), or fork before that (or 'spawn')"
    )
