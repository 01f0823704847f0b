"""A number for the values of a tensor and their order, whoever watches torch's functions."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

__all__ = ["same_hash", "value_hash"]

_BLOCK = 1 << 16


def value_hash(tensor: Tensor) -> Tensor | None:
    """Return a 0-d tensor that hardly is the same for other values, or for these in another order; None where
    there is none: on other devices than CPUs, of complex numbers, of nothing, of tensors that are more than
    numbers in memory.

    >>> x = torch.arange(3.0)
    >>> same_hash(value_hash(x), value_hash(x.clone())), same_hash(value_hash(x), value_hash(x.flip(0)))
    (True, False)
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_dense or tensor.device.type != "cpu" or tensor.is_complex() or not tensor.numel():
            return None
        # `torch.hash_tensor` is the same in any order, and 0 for an even count of equal values
        values = tensor.int_repr() if tensor.is_quantized else tensor.detach().resolve_neg()
        memory = values.contiguous().view(-1).view(torch.uint8)
        if memory.storage_offset() % 8:
            memory = memory.clone()
        whole = len(memory) // 8 * 8
        weights = _weights()
        total = torch.zeros((), dtype=torch.int64)
        for block in (*memory[:whole].view(torch.int64).split(_BLOCK), memory[whole:].long()):
            total = total * 0x9E3779B1 + torch.dot(block, weights[: len(block)])
        return total


def same_hash(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether two hashes don't differ, as far as there are any."""
    if left is None or right is None:
        return True
    with torch._C.DisableTorchFunction():
        return torch.equal(left, right)


@cache
def _weights() -> Tensor:
    """Odd numbers, one for each place of a block."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 62), 1 << 62, (_BLOCK,), generator=generator) | 1
