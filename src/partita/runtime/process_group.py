"""The comm of real runs: one process a rank, over ``torch.distributed`` (gloo for CPU tensors, NCCL for CUDA
tensors).

All groups are the comm's own (see :mod:`~partita.runtime.own_groups`); the user's are read for rank, size and
store, and never used or destroyed.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
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
    prefixed,
    world_number,
)
from partita.errors import ArgumentError, ExecutionError
from partita.runtime._objects import HEADER_BYTES, as_tensor, pack, rest_bytes, unpack
from partita.runtime._operation import Key, Operation, wait_all, words_of
from partita.runtime._staging import as_bytes, copied_back, staged_for_receiving, staged_for_sending
from partita.runtime.comm import MAX_TAG, Handle, check_peer, check_ranks, check_tag, gather_through_rank_0
from partita.runtime.failure import FailureRecord, ending_error
from partita.runtime.interruptible import interruptible
from partita.runtime.lookout import Lookout, Team
from partita.runtime.meeting import meet_all
from partita.runtime.own_groups import OwnGroups
from partita.runtime.stalls import STALLS
from partita.runtime.waiters import Waiters
from partita.runtime.whereabouts import Wait, place_of

__all__ = ["ProcessGroupComm"]

_CPU = torch.device("cpu")
_OBJECT_TAG = MAX_TAG + 1
_MEET_TAG = MAX_TAG + 2
_MAX_UNSENT = 1000
_CLOSE_GRACE_S = 5.0
_EXIT_GRACE_S = 2.0
_ASK_S = 0.9
"""So long a rank whose time is over asks the others where they are, before it says who did not come."""
_SLOW = ("timed out", "timing out")
"""What gloo and NCCL say when an operation takes longer than it may."""
LOST_AFTER_S = 15.0
"""After so many seconds without an answer another host counts as lost."""


class ProcessGroupComm:
    """A :class:`~partita.runtime.comm.Comm` over processes. Made by :meth:`from_group`.

    Calls come from one thread. `size`, `rank` and every `src`, `dst` are ranks within the group it was made
    from.
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
        self._use_nccl = use_nccl
        self._closed = False
        self._gave_up: ExecutionError | None = None
        self._process = os.getpid()
        self._unsent: deque[Operation] = deque()
        self.waiters = Waiters()
        self.collectives: set[Operation] = set()
        self._launched: dict[RawGroup, Operation] = {}
        self._groups = OwnGroups(
            store, rank, size, timeout_s, self._check_usable, self._meet, self._explained
        )
        team = Team(self.name, rank, processes or tuple(range(size)), lost_after_s)
        connections, near = meet_all(store, team, timeout_s)
        self._lookout = Lookout(team, connections, near, self._abort)
        self._began = self._lookout.began
        self._lookout.start()
        try:
            self._data = self._groups.of_all("data")
        except BaseException as error:
            self.fail(error, "connecting")
            self._lookout.stop()
            raise
        atexit.register(self._at_exit)
        # multiprocessing ends its children with os._exit(), without atexit; but it calls this.
        self._child_exit = Finalize(None, self._at_exit, exitpriority=0)

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float | None = None,
        lost_after_s: float = LOST_AFTER_S,
    ) -> ProcessGroupComm:
        """A comm over the ranks of `group` (None: the default group). Collective over that group.

        Args:
            timeout_s: seconds that a ``wait()``, or making the comm, may take while all ranks are alive;
                None: the timeout that the group was made with (``init_process_group(timeout=...)``, 30
                minutes if not given). A failure is known long before.
            lost_after_s: seconds, at least 3, after which a host that does not answer the kernel's probes
                counts as lost. What the processes there do makes no difference to it.

        Raises:
            ArgumentError: there is no default group, this process is not in `group`, or a limit is too small.
            DeadlockError: the other ranks wait for this one elsewhere.
            PeerFailed: another rank ended before it came.
            ExecutionError: the ranks could not be connected, or some did not come in time.
        """
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        if rank < 0:
            raise ArgumentError(
                "this process is not a member of the group: make the comm on its members only"
            )
        if lost_after_s < 3:
            raise ArgumentError(f"lost_after_s is {lost_after_s:g}: give at least 3 seconds")
        store = group_store(group)
        if timeout_s is None:
            timeout_s = group_timeout(group).total_seconds()
        size = dist.get_world_size(group)
        STALLS.in_world(world_number())
        processes = tuple(dist.get_process_group_ranks(group))
        try:
            # All members make their comms on a group in the same order, so each one's own count names the
            # comm.
            key = f"partita/comms/{rank}"
            number = interruptible(partial(store.add, key, 1), timeout_s, "asking the store")
            prefix = f"partita/comm/{number}"
            use_nccl = "nccl" in dist.get_backend(group)
            name = f"{prefix} of {processes}"
            own = prefixed(store, prefix)
            options = {"name": name, "processes": processes, "lost_after_s": lost_after_s}
            comm = cls(own, rank, size, timeout_s, use_nccl, **options)  # type: ignore[arg-type]
        except ExecutionError:
            raise
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
        self.synchronize()

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
        needs = tuple(member for member in members if member != self.rank)
        self._check_usable()
        on_nccl = self._on_nccl(tensor)
        group = self._groups.collective(members, nccl=on_nccl)
        # gloo sums every dtype but int16.
        dtype = torch.int32 if tensor.dtype == torch.int16 else tensor.dtype
        staged = staged_for_sending(tensor, dtype, tensor.device if on_nccl else _CPU)
        post = partial(all_reduce_sum, group, staged)
        what = f"all_reduce over ranks {members}"
        return self._start(post, members, needs, what, staged, copied_back(tensor, staged))

    def broadcast(self, tensor: torch.Tensor, src: int) -> Handle:
        if not 0 <= src < self.size:
            raise ArgumentError(f"no rank {src} here: this comm has ranks 0 to {self.size - 1}")
        self._check_usable()
        on_nccl = self._on_nccl(tensor)
        members = tuple(range(self.size))
        group = self._groups.collective(members, nccl=on_nccl)
        staged = staged_for_sending(tensor, tensor.dtype, tensor.device if on_nccl else _CPU)
        post = partial(group.broadcast, staged, src)
        needs = (src,)
        if src == self.rank:  # along a tree, whose first branches are these
            steps = range((self.size - 1).bit_length())
            needs = tuple((src + 2**step) % self.size for step in steps)
        what = f"broadcast from rank {src}"
        return self._start(post, members, needs, what, staged, copied_back(tensor, staged))

    def barrier(self) -> None:
        self.all_gather_object(None)

    def synchronize(self) -> None:
        """Waits for the last message of each NCCL communicator; over gloo there is nothing left to wait
        for.
        """
        if self._launched:
            self._check_usable()
        while self._launched:
            _, last = self._launched.popitem()
            last.complete()

    def note_launched(self, pair: RawGroup, operation: Operation) -> None:
        """The device will come to it after all earlier ones of that communicator."""
        self._launched[pair] = operation

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed, so that nothing can be done with it any more; or it is closed."""
        return self._closed or self._lookout.failure is not None

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
            self._lookout.leave(ending=False)
            self._groups.abort()
            self._lookout.wait_until_all_left(_CLOSE_GRACE_S)
        self._lookout.stop()
        self._end_waits()
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
        key = ("send to", dst, tag, self._begin(("sent", dst, tag)))
        try:
            if pair is None:
                work = self._data.send([staged], dst, tag)
            else:
                work = pair.send([as_bytes(staged)], 1, tag)
        except RuntimeError as error:
            raise self._explained(error, (dst,), words_of(key)) from error
        return Operation(self, work, key, (dst,), staged, None, pair)

    def _recv(self, buffer: torch.Tensor, src: int, tag: int) -> Operation:
        self._check_usable()
        pair = self._groups.pair(src, self.rank) if self._on_nccl(buffer) else None
        staged = staged_for_receiving(buffer, _CPU if pair is None else buffer.device)
        finish = copied_back(buffer, staged)
        key = ("recv from", src, tag, self._begin(("received", src, tag)))
        try:
            if pair is None:
                work = self._data.recv([staged], src, tag)
            else:
                work = pair.recv([as_bytes(staged)], 0, tag)
        except RuntimeError as error:
            raise self._explained(error, (src,), words_of(key)) from error
        return Operation(self, work, key, (src,), staged, finish, pair)

    def _start(
        self,
        post: Callable[[], RawWork],
        members: tuple[int, ...],
        needs: tuple[int, ...],
        what: str,
        tensor: torch.Tensor,
        finish: Callable[[], None] | None,
    ) -> Operation:
        key: Key = ("collective", members, self._begin(("collective", members)))
        try:
            operation = Operation(self, post(), key, needs, tensor, finish, None, what)
        except RuntimeError as error:
            raise self._explained(error, needs, what) from error
        self.collectives.add(operation)
        return operation

    def _begin(self, kind: tuple[Any, ...]) -> int:
        """Counts an operation of that kind, for those who ask whether this rank has come."""
        self._lookout.thread = threading.get_ident()
        number = self._began.get(kind, 0) + 1
        self._began[kind] = number
        return number

    def _meet(self, members: tuple[int, ...]) -> None:
        """Returns when all `members` have called it."""
        others = [member for member in members if member != self.rank]
        token = torch.zeros(1, dtype=torch.uint8)
        handles = [self._send(token, other, _MEET_TAG) for other in others]
        handles += [self._recv(torch.empty_like(token), other, _MEET_TAG) for other in others]
        wait_all(handles)

    def _check_usable(self) -> None:
        if self._lookout.failure is not None:
            raise self._lookout.failure.to_error()
        if self._closed:
            raise ExecutionError(f"rank {self.rank} uses a comm that it has closed: make a new one")

    # Failure.

    def _abort(self) -> None:
        """Ends whatever this rank waits for."""
        try:
            self._groups.abort()
        finally:
            self.waiters.release()

    def _end_waits(self) -> None:
        """A group is destroyed only when nothing runs in it: that would wait for it, deaf to everything."""
        running = [operation.block for operation in self.collectives]
        self.waiters.end(running, kept=list(self._groups.made.values()))
        self.collectives.clear()

    def explain(self, error: RuntimeError, wait: Wait, what: str) -> ExecutionError:
        """What to raise for `error`, which ended a wait of this thread. Tells the other ranks too."""
        if not any(words in str(error).lower() for words in _SLOW):
            return self._explained(error, tuple(wait.needs), what)
        if self._lookout.failure is None:
            self._give_up(wait, what)
        assert self._lookout.failure is not None
        return self._own_or_peers()

    def _explained(self, error: RuntimeError, needs: tuple[int, ...], what: str) -> ExecutionError:
        """What to raise where a connection broke."""
        if self._lookout.explain(needs, what) is None:
            broken = ExecutionError(
                f"a connection of rank {self.rank} broke in {what}, and no rank is known to have failed: "
                f"look at the network. The system says: {error}"
            )
            self.fail(broken, what)
        return self._own_or_peers()

    def _own_or_peers(self) -> ExecutionError:
        """The failure of the comm; what this rank has given up for by itself, it raises itself."""
        record = self._lookout.failure
        assert record is not None
        if record.rank == self.rank and record.kind == "raised" and self._gave_up is not None:
            return self._gave_up
        return record.to_error()

    def _give_up(self, wait: Wait, what: str) -> None:
        """The time is over. A rank that does not answer is to blame, be it this one that waits for it or
        another; where all do, this one says where they are.
        """
        absent, needs = STALLS.absent(wait, _ASK_S), tuple(wait.needs)
        silent = [one for one in absent if one.silent_s]
        seconds = self.timeout.total_seconds()
        behind = None if silent else STALLS.silent_behind(wait)
        if behind is not None and behind[0] in self._lookout.team.processes:
            rank = self._lookout.team.processes.index(behind[0])
            summary = (
                f"a rank for which rank {self.rank} has waited {seconds:g} s in {what} waits for it, and it "
                f"has not answered for {behind[1]:.1f} s"
            )
            self._lookout.publish(FailureRecord(rank, "silent", summary=summary))
            return
        if silent:
            summary = (
                f"rank {self.rank} has waited {seconds:g} s for it in {what}, and it has not answered "
                f"for {max(silent[0].silent_s, 0.1):.1f} s"
            )
            self._lookout.publish(FailureRecord(silent[0].rank, "silent", summary=summary))
            return
        first = absent[0].rank if absent else needs[0] if needs else self.rank
        places = "; ".join(f"rank {one.rank} is in {one.place}" for one in absent[:4] if one.place)
        self._gave_up = ExecutionError(
            f"rank {self.rank} waited {seconds:g} s in {what}, and rank {first}, "
            f"though alive, did not answer{f' ({places})' if places else ''}: see that both sides take part, "
            "or give ProcessGroupComm.from_group, or init_process_group, a larger timeout"
        )
        self.fail(self._gave_up, f"{place_of(threading.get_ident())} ({what})")

    def _flush_objects(self) -> None:
        """Lets objects that a slower peer has yet to receive leave; gives up on those that nobody wants."""
        try:
            for operation in self._unsent:
                operation.flush(timedelta(seconds=_CLOSE_GRACE_S))
        except RuntimeError:
            return

    def _at_exit(self) -> None:
        """The process ends with the comm open. An exception that ends it is a failure to the others at
        once (what `ending_error` can't see, only a ``with`` block around the training sees). Else it leaves,
        and where others have not left too within seconds, that is a failure to them.
        """
        self._forget_exit()
        if not self._is_own:
            return
        error = ending_error()
        if error is not None:
            self.fail(error, "the main program")
        elif self._lookout.failure is None:
            self._flush_objects()
            self._lookout.leave(ending=True)
            self._lookout.wait_until_all_left(_EXIT_GRACE_S)
        self._lookout.stop()
        self._end_waits()

    @property
    def _is_own(self) -> bool:
        """Not so in a child that the rank has forked: that one speaks for nobody."""
        return os.getpid() == self._process

    def _forget_exit(self) -> None:
        atexit.unregister(self._at_exit)
        self._child_exit.cancel()
