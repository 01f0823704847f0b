"""Memory that is lent: whoever has it keeps it alive, and the owner can see whether somebody has it."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

__all__ = ["Loan", "lend"]


class Loan:
    """Whether lent memory is still in use, by a tensor or a view of one, in Python or in an autograd
    graph.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)

    @property
    def returned(self) -> bool:
        """Nobody has the memory any more."""
        return bool(self._reference.expired())


def lend(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A second storage on the same memory, which lives as long as either of the two.

    >>> tensor = torch.ones(2)
    >>> lent = lend(tensor.untyped_storage())
    >>> loan = Loan(lent)
    >>> lent.data_ptr() == tensor.data_ptr(), loan.returned
    (True, False)
    >>> del lent
    >>> loan.returned
    True
    """
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return from_dlpack(to_dlpack(flat)).untyped_storage()
