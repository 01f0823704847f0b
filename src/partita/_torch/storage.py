"""Which tensors share memory."""

from __future__ import annotations

import torch

__all__ = ["storage_key"]


def storage_key(tensor: torch.Tensor) -> int:
    """A number equal for two living tensors exactly where they share a storage; works for fake and meta
    tensors too.

    A tensor subclass without a storage of its own is its own key.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)
