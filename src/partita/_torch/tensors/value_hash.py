"""A number for the values of a tensor, whoever watches torch's functions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["same_hash", "value_hash"]


def value_hash(tensor: Tensor) -> Tensor | None:
    """Return a 0-d tensor that hardly is the same for other values; None where there is none: on other
    devices than CPUs, of complex numbers, of nothing, of tensors that are more than numbers in memory.

    >>> x = torch.arange(3.0)
    >>> same_hash(value_hash(x), value_hash(x.clone())), same_hash(value_hash(x), value_hash(x + 1))
    (True, False)
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_dense or tensor.device.type != "cpu" or tensor.is_complex() or not tensor.numel():
            return None
        return torch.hash_tensor(tensor)


def same_hash(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether two hashes don't differ, as far as there are any."""
    if left is None or right is None:
        return True
    with torch._C.DisableTorchFunction():
        return torch.equal(left, right)
