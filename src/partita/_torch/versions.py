"""How often a tensor's memory has been written to."""

from __future__ import annotations

from torch import Tensor

__all__ = ["writes_to"]


def writes_to(tensor: Tensor) -> int:
    """A number that grows with each write to the tensor or a view of it; 0 where torch does not count
    (tensors made under inference mode).
    """
    return 0 if tensor.is_inference() else tensor._version
