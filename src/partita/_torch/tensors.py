"""What a tensor is made of."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["has_memory"]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there are elements to read: not for a tensor on the meta device, nor for a fake one.

    >>> has_memory(torch.zeros(2)), has_memory(torch.zeros(2, device="meta"))
    (True, False)
    """
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
