"""A second storage on the memory of a tensor: its owner can see whether somebody else uses it."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

__all__ = ["StorageAlias"]


class StorageAlias:
    """A second storage on the memory of a first. The memory lives as long as either of the two.

    >>> tensor = torch.ones(2)
    >>> alias = StorageAlias(tensor.untyped_storage())
    >>> base = torch.empty(0).set_(alias.storage, 0, (2,), (1,))
    >>> alias.count_own_references()
    >>> part = base.detach()[1:]
    >>> part.data_ptr() == tensor.data_ptr() + 4, alias.is_read
    (True, True)
    >>> del part
    >>> alias.is_read
    False

    Attributes:
        storage: the second one. The owner makes tensors on it, calls `count_own_references`, and hands out
            views of them.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.storage: torch.UntypedStorage = from_dlpack(to_dlpack(flat)).untyped_storage()
        self._handle = self.storage._cdata
        self.count_own_references()

    def count_own_references(self) -> None:
        """Take all that refers to the storage now for the owner's."""
        self._own: int = torch._C._storage_Use_Count(self._handle)

    @property
    def is_read(self) -> bool:
        """Whether anything else refers to it: a tensor or a view of one, in Python or an autograd graph."""
        return bool(torch._C._storage_Use_Count(self._handle) > self._own)
