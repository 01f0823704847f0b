"""Memory that is lent: whoever has it keeps it alive, and the owner can see whether somebody has it."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

__all__ = ["LentMemory"]


class LentMemory:
    """A second storage on the memory of another one. The memory lives as long as either of the two.

    >>> tensor = torch.ones(2)
    >>> lent = LentMemory(tensor.untyped_storage())
    >>> base = torch.empty(0).set_(lent.storage, 0, (2,), (1,))
    >>> lent.count_own_references()
    >>> part = base.detach()[1:]
    >>> part.data_ptr() == tensor.data_ptr() + 4, lent.is_read
    (True, True)
    >>> del part
    >>> lent.is_read
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
        """What refers to the storage by now is the owner's."""
        self._own: int = torch._C._storage_Use_Count(self._handle)

    @property
    def is_read(self) -> bool:
        """Whether somebody else has it: a tensor or a view of one, in Python or in an autograd graph."""
        return bool(torch._C._storage_Use_Count(self._handle) > self._own)
