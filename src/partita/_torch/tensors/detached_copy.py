"""Copies that share neither memory nor history."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["detached_copy", "detached_leaf_copy"]


def detached_copy(value: Any) -> Any:
    """Return a copy of a tensor, without its history; anything else as it is.

    >>> import torch
    >>> detached_copy(torch.ones(2, requires_grad=True)).requires_grad
    False
    """
    return value.detach().clone() if isinstance(value, Tensor) else value


def detached_leaf_copy(value: Any) -> Any:
    """Return a copy of a tensor that is a leaf of autograd and requires a gradient where the tensor does."""
    copy = detached_copy(value)
    return copy.requires_grad_(value.requires_grad) if isinstance(value, Tensor) else copy
