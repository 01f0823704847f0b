"""Memory that ``torch.multiprocessing`` shares: tensors given to a process lie in memory that both can write
to. Ranks that are given one model so would all step the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["leave_shared_memory"]


def leave_shared_memory(tensors: Iterable[Tensor]) -> None:
    """Move tensors on the CPU, in place, out of memory that other processes see. Those that share a storage
    share one afterwards.

    >>> weight = torch.zeros(2).share_memory_()
    >>> leave_shared_memory([weight])
    >>> weight.is_shared()
    False
    """
    moved: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            continue
        if tensor.layout != torch.strided or not tensor.is_shared():
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in moved:
            moved[storage.data_ptr()] = torch.UntypedStorage(storage.nbytes()).copy_(storage)
        own = moved[storage.data_ptr()]
        view = torch.empty(0, dtype=tensor.dtype)
        tensor.data = view.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())
