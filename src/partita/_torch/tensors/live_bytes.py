"""How many bytes of the tensors that operators make are alive, and how many were at most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.tensors.storage import storage_of

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators make in this block, on any device, meta and fake tensors included.

    What was there before the block does not count, nor do views of it. What a kernel takes and gives back by
    itself is not seen, nor is what a branch or a loop (``torch.cond``, ``scan``) makes within and does not
    return.

    Attributes:
        most: the most bytes that were alive after an operator, since the beginning or the last `start_anew`.

    >>> with LiveBytes() as live:
    ...     x = torch.ones(10, device="meta")
    ...     y = (x + 1) * 2
    >>> live.most, live.now()
    (120, 80)
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        before: set[int] | None = None
        for storage in _storages(result):
            key = storage._cdata
            if key in self._storages:
                continue
            if before is None:
                before = {argument._cdata for argument in _storages((args, kwargs))}
            if key not in before:
                self._storages[key] = (StorageWeakRef(storage), storage.nbytes())
                self._bytes += storage.nbytes()
        self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        """Bytes that are alive."""
        dead = [key for key, (reference, _) in self._storages.items() if reference.expired()]
        for key in dead:
            self._bytes -= self._storages.pop(key)[1]
        return self._bytes

    def alive(self) -> dict[int, int]:
        """The bytes of each storage that is alive, by its `storage_key`."""
        self.now()
        return {key: size for key, (_, size) in self._storages.items()}

    def start_anew(self) -> int:
        """Let `most` begin with what is alive now, and return that."""
        self.most = self.now()
        return self.most


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and (storage := storage_of(leaf)) is not None:
            yield storage
