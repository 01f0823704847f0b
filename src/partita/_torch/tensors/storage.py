"""Which tensors have memory, which share it, and memory that is watched but not kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "WeakStorage",
    "has_memory",
    "is_same_view",
    "on_one_memory",
    "same_bits",
    "storage_key",
    "storage_of",
    "storage_span",
]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there are elements to read: not for a tensor on the meta device, nor for a fake one.

    >>> has_memory(torch.zeros(2)), has_memory(torch.zeros(2, device="meta"))
    (True, False)
    """
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; None for a sparse one and a subclass that have none of their own.

    >>> storage_of(torch.ones(2, device="meta")).nbytes(), storage_of(torch.eye(2).to_sparse())
    (8, None)
    """
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def storage_key(tensor: torch.Tensor) -> int:
    """A number equal for two living tensors exactly where they share a storage; works for fake and meta
    tensors too.

    A tensor subclass without a storage of its own is its own key.
    """
    storage = storage_of(tensor)
    return id(tensor) if storage is None else storage._cdata


def storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte of a tensor's storage, and of the one behind its last.

    >>> start, stop = storage_span(torch.zeros(4)[1:])
    >>> stop - start
    16
    """
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def is_same_view(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both are the same elements of the same storage, in the same order.

    >>> x = torch.zeros(4)
    >>> is_same_view(x, x.view(4)), is_same_view(x[:2], x[2:])
    (True, False)
    """
    same = tensor.dtype == other.dtype and tensor.shape == other.shape and tensor.stride() == other.stride()
    offsets = tensor.storage_offset(), other.storage_offset()
    return same and storage_key(tensor) == storage_key(other) and offsets[0] == offsets[1]


def on_one_memory(tensors: Sequence[tuple[int, torch.Tensor]]) -> list[list[int]]:
    """The numbers of tensors whose storages overlap, in bytes (what is handed out, or comes from elsewhere,
    has a storage of its own on the same memory).
    """
    spans = []
    for number, tensor in tensors:
        start, stop = storage_span(tensor)
        if start < stop:
            spans.append((start, stop, number))
    groups: list[list[int]] = []
    end = 0
    for start, stop, number in sorted(spans):
        if not groups or start >= end:
            groups.append([])
        groups[-1].append(number)
        end = max(end, stop)
    return [numbers for numbers in groups if len(numbers) > 1]


class WeakStorage:
    """The memory of a tensor, as long as somebody else keeps it.

    >>> tensor = torch.ones(2)
    >>> weak = WeakStorage(tensor)
    >>> weak.bytes().numel()
    8
    >>> del tensor
    >>> weak.bytes() is None
    True
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())
        self._device = tensor.device

    def is_alive(self) -> bool:
        """Whether somebody keeps it."""
        return not self._reference.expired()

    def bytes(self) -> torch.Tensor | None:
        """All of it, as uint8; None once it is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are of one kind and hold the same bits.

    >>> same_bits(torch.zeros(2), torch.zeros(2)), same_bits(torch.zeros(2), -torch.zeros(2))
    (True, False)
    """
    facts = [(side.dtype, side.shape, side.device, side.layout) for side in (left, right)]
    if facts[0] != facts[1] or left.layout != torch.strided or not (has_memory(left) and has_memory(right)):
        return False
    bits = [side.detach().contiguous().reshape(-1).view(torch.uint8) for side in (left, right)]
    return torch.equal(*bits)
