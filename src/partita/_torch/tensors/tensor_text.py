"""Dtypes and shapes as text, for messages and for comparisons between ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["dtype_and_shape", "short_name", "tensor_text"]


def short_name(kind: torch.dtype | torch.layout) -> str:
    """Return the name of a dtype or layout without ``torch.``.

    >>> short_name(torch.float32), short_name(torch.sparse_coo)
    ('float32', 'sparse_coo')
    """
    return str(kind).removeprefix("torch.")


def dtype_and_shape(dtype: torch.dtype, shape: Iterable[object]) -> str:
    """Return a dtype and a shape, whose sizes may be symbols.

    >>> dtype_and_shape(torch.int64, ("batch", 8))
    "int64['batch', 8]"
    """
    return f"{short_name(dtype)}{list(shape)}"


def tensor_text(tensor: torch.Tensor) -> str:
    """Return the dtype and shape of a tensor.

    >>> tensor_text(torch.zeros(2, 3))
    'float32[2, 3]'
    """
    return dtype_and_shape(tensor.dtype, tensor.shape)
