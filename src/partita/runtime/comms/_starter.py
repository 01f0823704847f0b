"""Starting the operations of one comm on torch's groups: gloo's, and NCCL's for what is on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita._torch.distributed.groups import RawGroup, RawWork
from partita.runtime.comms._operation import Key, Operation, Owner, ReceivedTogether, SentTogether, words_of
from partita.runtime.comms._staging import (
    all_copied_back,
    as_bytes,
    copied_back,
    is_sent_as_it_is,
    staged_for_receiving,
    staged_for_sending,
)
from partita.runtime.comms.comm import Handle
from partita.runtime.comms.own_groups import OwnGroups
from partita.runtime.failures.failure_detector import FailureDetector

__all__ = ["Starter"]

_CPU = torch.device("cpu")


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
        return self._send_over_gloo(tensors, dst, tags)

    def recv_together(self, buffers: Sequence[torch.Tensor], src: int, tags: Sequence[int]) -> Handle:
        """See `Comm.recv_together`."""
        if self.use_nccl:
            *others, last = [self.recv(to, src, tag) for to, tag in zip(buffers, tags, strict=True)]
            return ReceivedTogether(others, last)
        staged = [to if to.is_cpu else staged_for_receiving(to, _CPU) for to in buffers]
        return self._recv_over_gloo(buffers, staged, src, tags)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Operation:
        if not self.on_nccl(tensor):
            return self._send_over_gloo((tensor,), dst, (tag,))
        self._check_usable()
        pair = self._groups.pair(self._owner.rank, dst)
        staged = staged_for_sending(tensor, tensor.dtype, tensor.device)
        key = ("send to", dst, tag, self._begin(("sent", dst, tag)))
        try:
            work = pair.send([as_bytes(staged)], 1, tag)
        except RuntimeError as error:
            raise self._owner.errors.of_connection(error, (dst,), words_of(key)) from error
        return Operation(self._owner, (work,), key, (dst,), (staged,), None, pair)

    def _send_over_gloo(self, tensors: Sequence[torch.Tensor], dst: int, tags: Sequence[int]) -> Operation:
        self._check_usable()
        send, works = self.data.send, []
        staged = [
            tensor if is_sent_as_it_is(tensor) else staged_for_sending(tensor, tensor.dtype, _CPU)
            for tensor in tensors
        ]
        key = ("send to", dst, tags[-1], self._begin(("sent", dst, tags[-1])))
        try:
            for tensor, tag in zip(staged, tags, strict=True):
                works.append(send([tensor], dst, tag))
        except RuntimeError as error:
            raise self._owner.errors.of_connection(error, (dst,), words_of(key)) from error
        return Operation(self._owner, works, key, (dst,), staged, None)

    def recv(self, buffer: torch.Tensor, src: int, tag: int) -> Operation:
        if not self.on_nccl(buffer):
            return self._recv_over_gloo((buffer,), (staged_for_receiving(buffer, _CPU),), src, (tag,))
        self._check_usable()
        pair = self._groups.pair(src, self._owner.rank)
        staged = staged_for_receiving(buffer, buffer.device)
        finish = copied_back(buffer, staged)
        key = ("recv from", src, tag, self._begin(("received", src, tag)))
        try:
            work = pair.recv([as_bytes(staged)], 0, tag)
        except RuntimeError as error:
            raise self._owner.errors.of_connection(error, (src,), words_of(key)) from error
        return Operation(self._owner, (work,), key, (src,), (staged,), finish, pair)

    def _recv_over_gloo(
        self,
        buffers: Sequence[torch.Tensor],
        staged: Sequence[torch.Tensor],
        src: int,
        tags: Sequence[int],
    ) -> Operation:
        self._check_usable()
        receive, works = self.data.recv, []
        key = ("recv from", src, tags[-1], self._begin(("received", src, tags[-1])))
        try:
            for tensor, tag in zip(staged, tags, strict=True):
                works.append(receive([tensor], src, tag))
        except RuntimeError as error:
            raise self._owner.errors.of_connection(error, (src,), words_of(key)) from error
        return Operation(self._owner, works, key, (src,), staged, all_copied_back(buffers, staged))

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
            raise self._owner.errors.of_connection(error, needs, what) from error
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
