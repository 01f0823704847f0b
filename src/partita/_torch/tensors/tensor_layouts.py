"""Whether tensors are like others in all but their values and addresses, asked in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

__all__ = ["TensorLayouts"]


class TensorLayouts:
    """Class, dtype, device, shape, strides, conjugation and ``requires_grad`` of tensors in a row.

    >>> layouts = TensorLayouts([torch.zeros(2, 3)])
    >>> [layouts.hold_for(values) for values in ([torch.ones(2, 3)], [torch.ones(3, 2).t()], [])]
    [True, False, False]
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._length = len(tensors)
        sizes: list[Any] = [list(tensor.size()) for tensor in tensors]
        strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def hold_for(self, values: Sequence[Any]) -> bool:
        """Whether these are tensors of the same layouts, in the same order."""
        return len(values) == self._length and bool(self._guards.check(*values))
