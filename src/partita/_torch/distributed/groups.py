"""Communication groups that belong to nobody else: made straight from a store, and able to be aborted.

``torch.distributed.new_group`` registers what it makes in global tables and must be called by every rank of
the world. A comm wants groups of its own, made by their members alone, that end with the comm.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from partita.errors import ArgumentError, ExecutionError

__all__ = [
    "RawGroup",
    "RawWork",
    "Store",
    "abort_gloo",
    "abort_nccl",
    "all_reduce_sum",
    "gloo_group",
    "group_store",
    "group_timeout",
    "is_of_parent",
    "nccl_group",
    "prefixed",
    "world_number",
]

_ABORT_TAG = 2**31 - 1
_worlds: list[weakref.ref[object]] = []
_worlds_of_parents: set[int] = set()


class Store(Protocol):
    """A key-value store that all ranks share. Any of its methods raises RuntimeError where it can't be
    reached.
    """

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def clone(self) -> Store: ...


class RawWork(Protocol):
    """What a group's operation returns."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Blocks without holding the interpreter lock; raises RuntimeError when the operation failed."""
        ...


class RawGroup(Protocol):
    """The few methods of a c10d backend that partita calls."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> RawWork: ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> RawWork: ...

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> RawWork: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> RawWork: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


def world_number() -> int:
    """Return how often ``torch.distributed`` has been initialised when the default group was made; 0 without
    one. It tells what belongs to an earlier world, without keeping that world's groups alive.
    """
    world: object = dist.group.WORLD
    if world is None:
        return 0
    if not _worlds or _worlds[-1]() is not world:
        _worlds.append(weakref.ref(world))
    return len(_worlds)


def is_of_parent() -> bool:
    """Return whether the default group is one of a process that has forked this one: to use its connections
    would end that process.
    """
    return world_number() in _worlds_of_parents


def _note_fork() -> None:
    number = world_number()
    if number:
        _worlds_of_parents.add(number)


os.register_at_fork(after_in_child=_note_fork)


def group_store(group: dist.ProcessGroup | None) -> Store:
    """Return a new connection to the key-value store of `group` (None: the default group).

    A call on a store blocks other calls on the same connection, but not those on another one.

    Raises:
        ArgumentError: there is no default group.
        RuntimeError: the process that hosts the store is gone.
    """
    chosen = group if group is not None else dist.group.WORLD
    if chosen is None:
        raise ArgumentError("no process group: call torch.distributed.init_process_group() first")
    store: Store = chosen.get_group_store()  # type: ignore[assignment]
    # Raises where its host is gone, to which a new connection would be tried for long.
    store.check(["partita"])
    return store.clone()


def group_timeout(group: dist.ProcessGroup | None) -> timedelta:
    """Return the timeout that `group` (None: the default group) was made with: that of its backend for CPU
    tensors, or else for CUDA tensors.

    Raises:
        ArgumentError: there is no default group.
    """
    chosen = group if group is not None else dist.group.WORLD
    if chosen is None:
        raise ArgumentError("no process group: call torch.distributed.init_process_group() first")
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):
            timeout: timedelta = chosen._get_backend(torch.device(device)).options._timeout
            return timeout
    return timedelta(minutes=30)


def prefixed(store: Store, prefix: str) -> Store:
    """Return a view of `store` that puts `prefix` before every key."""
    return cast(Store, dist.PrefixStore(prefix, cast(Any, store)))  # type: ignore[attr-defined]


@cache
def _gloo_device() -> Any:
    """Return the process's listening device, which all gloo groups share (on ``GLOO_SOCKET_IFNAME``)."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def gloo_group(store: Store, rank: int, size: int, timeout_s: float) -> RawGroup:
    """Return a gloo group of `size` ranks that meet in `store`. Blocks until all are there, at most
    `timeout_s` seconds.

    Raises:
        RuntimeError: a rank did not come, or could not be reached.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [_gloo_device()]
    return cast(RawGroup, dist.ProcessGroupGloo(cast(Any, store), rank, size, options))


def nccl_group(store: Store, rank: int, size: int, timeout_s: float) -> RawGroup:
    """Return an NCCL group of `size` ranks that meet in `store` at their first operation.

    Raises:
        ExecutionError: this torch was built without NCCL.
    """
    if not dist.is_nccl_available():
        raise ExecutionError(
            "this build of torch has no NCCL: move the tensors to the CPU, or install a CUDA build"
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return cast(RawGroup, dist.ProcessGroupNCCL(cast(Any, store), rank, size, options))


def all_reduce_sum(group: RawGroup, tensor: torch.Tensor) -> RawWork:
    """Start to sum `tensor` over `group`, in place."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    return group.allreduce([tensor], options)


def abort_gloo(group: RawGroup) -> None:
    """End every operation of `group`, here and at its peers: whoever waits gets a RuntimeError at once.

    Gloo's own ``abort()`` and ``shutdown()`` wake nobody (torch 2.13). A receive that times out does: it
    closes all of the group's connections. So one is started here that nobody will ever answer, and given a
    millisecond. A connection that is closed already fails at once without touching the others; hence all
    peers are tried.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


def abort_nccl(group: RawGroup) -> None:
    """End every operation of an NCCL group, so that streams that wait for it go on (with garbage)."""
    with suppress(RuntimeError):
        group.abort()  # type: ignore[attr-defined]
