"""Starting the operations of one comm on torch's groups: gloo's, and NCCL's for what is on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from partita._torch.distributed.groups import RawGroup, RawWork
from partita.runtime.comms._operation import Key, Operation, Owner, ReceivedTogether, SentTogether, words_of
from partita.runtime.comms._staging import (
    all_copied_back,
    as_bytes,
    copied_back,
    staged_for_receiving,
    staged_for_sending,
)
from partita.runtime.comms.comm import Handle
from partita.runtime.comms.own_groups import OwnGroups
from partita.runtime.failures.failure_detector import FailureDetector

__all__ = ["Starter"]

_CPU = torch.device("cpu")
_IS_CPU = attrgetter("is_cpu")


class Starter:
    """Starts operations, and counts them for ranks that ask which of them this one has begun.

    Args:
        owner: the comm.
        groups: its groups.
        detector: is told of each operation.
        check_usable: raises where the comm has failed.
        use_nccl: for tensors on a GPU.

    Attributes:
        data: gloo, all ranks.
    """

    data: RawGroup

    def __init__(
        self,
        owner: Owner,
        groups: OwnGroups,
        detector: FailureDetector,
        check_usable: Callable[[], None],
        *,
        use_nccl: bool,
    ) -> None:
        self.use_nccl = use_nccl
        self._owner = owner
        self._groups = groups
        self._detector = detector
        self._began = detector.began
        self._check_usable = check_usable

    def on_nccl(self, tensor: torch.Tensor) -> bool:
        return self.use_nccl and tensor.is_cuda

    def send_together(self, tensors: Sequence[torch.Tensor], dst: int, tags: Sequence[int]) -> Handle:
        """See `Comm.send_together`."""
        if self.use_nccl:
            sends = zip(tensors, tags, strict=True)
            return SentTogether([self.send(tensor, dst, tag) for tensor, tag in sends])
        self._check_usable()
        staged = [staged_for_sending(tensor, tensor.dtype, _CPU) for tensor in tensors]
        return self._sent(staged, dst, tags)

    def recv_together(self, buffers: Sequence[torch.Tensor], src: int, tags: Sequence[int]) -> Handle:
        """See `Comm.recv_together`."""
        if self.use_nccl:
            *others, last = [self.recv(to, src, tag) for to, tag in zip(buffers, tags, strict=True)]
            return ReceivedTogether(others, last)
        self._check_usable()
        if all(map(_IS_CPU, buffers)):
            return self._received(buffers, src, tags, None)
        staged = [staged_for_receiving(to, _CPU) for to in buffers]
        return self._received(staged, src, tags, all_copied_back(buffers, staged))

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Operation:
        self._check_usable()
        if not self.on_nccl(tensor):
            return self._sent((staged_for_sending(tensor, tensor.dtype, _CPU),), dst, (tag,))
        pair = self._groups.pair(self._owner.rank, dst)
        staged = staged_for_sending(tensor, tensor.dtype, tensor.device)
        return self._sent((as_bytes(staged),), dst, (tag,), pair)

    def recv(self, buffer: torch.Tensor, src: int, tag: int) -> Operation:
        self._check_usable()
        pair = self._groups.pair(src, self._owner.rank) if self.on_nccl(buffer) else None
        staged = staged_for_receiving(buffer, _CPU if pair is None else buffer.device)
        message = staged if pair is None else as_bytes(staged)
        return self._received((message,), src, (tag,), copied_back(buffer, staged), pair)

    def _sent(
        self, staged: Sequence[torch.Tensor], dst: int, tags: Sequence[int], pair: RawGroup | None = None
    ) -> Operation:
        """Start to send over gloo, or over a pair of NCCL, whose sender is its member 0."""
        send, member = (self.data.send, dst) if pair is None else (pair.send, 1)
        key = ("send to", dst, tags[-1], self._begin(("sent", dst, tags[-1])))
        try:
            works = [send([tensor], member, tag) for tensor, tag in zip(staged, tags, strict=True)]
        except RuntimeError as error:
            raise self._owner.errors.of_connection(error, (dst,), words_of(key)) from None
        return Operation(self._owner, works, key, (dst,), staged, None, pair)

    def _received(
        self,
        staged: Sequence[torch.Tensor],
        src: int,
        tags: Sequence[int],
        finish: Callable[[], None] | None,
        pair: RawGroup | None = None,
    ) -> Operation:
        """Start to receive likewise; `finish` is called when all is here."""
        receive, member = (self.data.recv, src) if pair is None else (pair.recv, 0)
        key = ("recv from", src, tags[-1], self._begin(("received", src, tags[-1])))
        try:
            works = [receive([tensor], member, tag) for tensor, tag in zip(staged, tags, strict=True)]
        except RuntimeError as error:
            raise self._owner.errors.of_connection(error, (src,), words_of(key)) from None
        return Operation(self._owner, works, key, (src,), staged, finish, pair)

    def collective(
        self,
        post: Callable[[RawGroup, torch.Tensor], RawWork],
        tensor: torch.Tensor,
        dtype: torch.dtype,
        members: tuple[int, ...],
        needs: tuple[int, ...],
        what: str,
    ) -> Operation:
        self._check_usable()
        on_nccl = self.on_nccl(tensor)
        group = self._groups.collective(members, nccl=on_nccl)
        staged = staged_for_sending(tensor, dtype, tensor.device if on_nccl else _CPU)
        key: Key = ("collective", members, self._begin(("collective", members)), what)
        self._detector.note_collective(key)
        try:
            work = post(group, staged)
        except RuntimeError as error:
            raise self._owner.errors.of_connection(error, needs, what) from None
        finish = copied_back(tensor, staged)
        operation = Operation(self._owner, (work,), key, needs, (staged,), finish, None, what)
        self._owner.collectives.add(operation)
        return operation

    def _begin(self, kind: tuple[Any, ...]) -> int:
        """Count an operation of this kind, for ranks that ask whether this one has begun it."""
        self._detector.thread = threading.get_ident()
        number = self._began.get(kind, 0) + 1
        self._began[kind] = number
        return number
