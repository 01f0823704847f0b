"""Gloo in NCCL's clothes: what the comm does on GPUs, on a machine without one.

As on NCCL, a tag selects nothing, and only contiguous tensors of the types that NCCL has can be sent. More
strictly than there, a group is made only when all of its members are. Numbers pass for tensors on a device;
bytes and int64, which the comm and its users send about what they do, for tensors on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.runtime.worlds import endings
from torch import Tensor

from partita._torch.distributed.groups import RawGroup, RawWork, abort_gloo, gloo_group, group_store, prefixed
from partita.runtime import Comm, ProcessGroupComm
from partita.runtime.comms import own_groups
from partita.runtime.comms._starter import Starter

TYPES = frozenset({
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool),
})  # fmt: skip
ON_CPU = frozenset({torch.uint8, torch.int64})
LIMIT_S = 20.0


class Message:
    """A send or receive, which may be waited for more than once, as on NCCL.

    Attributes:
        by: who has waited: ``device`` (no timeout was given) or ``host``.
    """

    def __init__(self, inner: RawWork) -> None:
        self._inner = inner
        self.by: list[str] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.by:
            self._inner.wait(timeout or timedelta(seconds=LIMIT_S))
        self.by.append("device" if timeout is None else "host")
        return True


class NcclLike:
    """A group of the comm's.

    Attributes:
        messages: all that went through it.
    """

    def __init__(self, inner: RawGroup) -> None:
        self._inner = inner
        self.aborted = threading.Event()
        self.messages: list[Message] = []

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> RawWork:
        return self._noted(self._inner.send(_checked(tensors), dst, 0))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> RawWork:
        return self._noted(self._inner.recv(_checked(tensors), src, 0))

    def _noted(self, work: RawWork) -> RawWork:
        self.messages.append(Message(work))
        return self.messages[-1]

    def allreduce(self, tensors: list[Tensor], options: Any) -> RawWork:
        return self._inner.allreduce(tensors, options)  # which NCCL can do with complex numbers too

    def broadcast(self, tensor: Tensor, root: int) -> RawWork:
        return self._inner.broadcast(tensor, root)

    def rank(self) -> int:
        return self._inner.rank()

    def size(self) -> int:
        return self._inner.size()

    def abort(self) -> None:
        abort_gloo(self._inner)
        self.aborted.set()


def _checked(tensors: list[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        assert tensor.is_contiguous()
        assert tensor.dtype in TYPES, f"NCCL has no {tensor.dtype}"
    return tensors


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor passes for one on a device."""
    return tensor.dtype not in ON_CPU


@contextmanager
def nccl_like(comm: Comm) -> Iterator[ProcessGroupComm]:
    """A comm of the same ranks that believes in NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_groups, "nccl_group", lambda *args: NcclLike(gloo_group(*args)))
        patch.setattr(own_groups, "abort_nccl", NcclLike.abort)
        patch.setattr(Starter, "on_nccl", lambda self, value: self.use_nccl and on_device(value))
        store = prefixed(group_store(None), "nccl-like")
        with ProcessGroupComm(store, comm.rank, comm.size, LIMIT_S, use_nccl=True) as nccl:
            nccl.barrier()
            yield nccl


def _run(comm: Comm, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with nccl_like(comm) as nccl:
        return body(nccl, *args)


class NcclLikeWorld:
    """`ProcessWorld` with such a comm."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        ends = endings(self.size, _run, fn, args)
        for ending in ends:
            assert ending.error is None, ending.text
        return [ending.result for ending in ends]
