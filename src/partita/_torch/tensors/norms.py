"""Norms of many tensors at once, as torch's own gradient clipping computes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from partita.errors import ExecutionError

__all__ = ["each_norm"]


def each_norm(tensors: Sequence[Tensor], norm_type: float, foreach: bool | None = None) -> list[Tensor]:
    """The norm of each tensor, in order: 0-d, of the tensor's own dtype and device.

    The same bits as the norms that ``torch.nn.utils.clip_grad_norm_`` puts together.

    Args:
        foreach: one kernel for many tensors; None: wherever torch can.

    Raises:
        ExecutionError: ``foreach=True`` for a device that has no such kernels.

    >>> each_norm([torch.tensor([3.0, 4.0]), torch.zeros(2)], 2.0)
    [tensor(5.), tensor(0.)]
    """
    by_index: list[Tensor | None] = [None] * len(tensors)
    groups = _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True) if tensors else {}
    for (device, _), ([optional], indices) in groups.items():
        group = [tensor for tensor in optional if tensor is not None]
        if foreach and not _device_has_foreach_support(device):
            raise ExecutionError(f"foreach=True, but {device.type} has no such kernels: pass foreach=None")
        if foreach or (foreach is None and _has_foreach_support(group, device)):
            norms = list(torch._foreach_norm(group, norm_type))
        else:
            norms = [torch.linalg.vector_norm(tensor, norm_type) for tensor in group]
        for index, norm in zip(indices, norms, strict=True):
            by_index[index] = norm
    return [norm for norm in by_index if norm is not None]
