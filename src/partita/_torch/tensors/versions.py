"""How often a tensor's memory has been written to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

__all__ = ["same_versions", "times_written"]


def times_written(tensor: Tensor) -> int:
    """How often somebody has written to the tensor, to a view of it, or to what it is a view of; 0 where
    torch does not count (tensors made under inference mode).

    >>> x = torch.zeros(2)
    >>> before = times_written(x)
    >>> _ = x.add_(1)
    >>> times_written(x) - before
    1
    """
    return 0 if tensor.is_inference() else tensor._version


def same_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Writes to ``tensors`` in the block are not counted: autograd takes them for what they were."""
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(
        tuple(tensor for tensor in tensors if not tensor.is_inference())
    )
