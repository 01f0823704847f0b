"""In which order the elements of a tensor lie in memory, so that a receiver can lay them out like the sender.

A sum over a tensor adds in the order of memory. A stage that is handed a permuted tensor in plain order would
get other last bits than the uncut model, so room is made in the order that the tensor has there::

    sent    permute(x, [0, 2, 3, 1])  shape [2, 8, 8, 16]  stride [1024, 8, 1, 64]  order (0, 3, 1, 2)
    room    empty(2, 16, 8, 8).permute(0, 2, 3, 1)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["PLAIN", "memory_order", "room"]

PLAIN: tuple[int, ...] = ()
"""The order of a contiguous tensor."""


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor from the outermost in memory to the innermost; `PLAIN` for contiguous ones,
    and for those with gaps or overlaps, which a receiver gets without them.

    >>> memory_order(torch.empty(2, 3, 4)), memory_order(torch.empty(2, 3, 4).transpose(1, 2))
    ((), (0, 2, 1))
    """
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return PLAIN
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else PLAIN


def room(
    shape: Sequence[int],
    order: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """An empty tensor whose elements lie in that order.

    >>> room((2, 3, 4), (0, 2, 1), dtype=torch.float32).stride()
    (12, 1, 3)
    """
    if not order:
        return torch.empty(shape, dtype=dtype, device=device)
    inverse = [0] * len(order)
    for place, dim in enumerate(order):
        inverse[dim] = place
    return torch.empty([shape[dim] for dim in order], dtype=dtype, device=device).permute(inverse)
