"""Which tensors have memory, which share it, and memory that is watched but not kept."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["WeakStorage", "has_memory", "storage_key"]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there are elements to read: not for a tensor on the meta device, nor for a fake one.

    >>> has_memory(torch.zeros(2)), has_memory(torch.zeros(2, device="meta"))
    (True, False)
    """
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """A number equal for two living tensors exactly where they share a storage; works for fake and meta
    tensors too.

    A tensor subclass without a storage of its own is its own key.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


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

    def bytes(self) -> torch.Tensor | None:
        """All of it, as uint8; None once it is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
