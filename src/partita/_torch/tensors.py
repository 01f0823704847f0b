"""What a tensor is made of."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["has_memory", "times_written"]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there are elements to read: not for a tensor on the meta device, nor for a fake one.

    >>> has_memory(torch.zeros(2)), has_memory(torch.zeros(2, device="meta"))
    (True, False)
    """
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def times_written(tensor: torch.Tensor) -> int:
    """How often somebody has written to the tensor, or to one that it is a view of.

    >>> x = torch.zeros(2)
    >>> before = times_written(x)
    >>> _ = x.add_(1)
    >>> times_written(x) - before
    1
    """
    return tensor._version
