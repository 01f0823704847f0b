"""Copies of what is being written while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from partita._torch.containers.pytree import flatten_registered, unflatten

__all__ = ["SnapshotBuffers"]


class SnapshotBuffers:
    """Memory on the CPU that is reused for each snapshot, of the size of what the rank writes."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, nested: Mapping[str, Any]) -> dict[str, Any]:
        """The same values with copies of the tensors; overwrites what was returned before."""
        copied = self._copied("", nested)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copied

    def _copied(self, prefix: str, nested: Mapping[str, Any]) -> dict[str, Any]:
        copies: dict[str, Any] = {}
        for name, value in nested.items():
            key = f"{prefix}.{name}"
            if isinstance(value, DTensor):
                copies |= BlockingAsyncStager().stage({name: value})
            elif isinstance(value, Tensor):
                copies[name] = self._buffer(key, value).copy_(value, non_blocking=True)
            else:
                copies[name] = self._copied(key, value) if type(value) is dict else _copy_of(value)
        return copies

    def _buffer(self, key: str, value: Tensor) -> Tensor:
        kept = self._kept.get(key)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            pinned = value.device.type == "cuda"  # makes the copy fast
            kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
            self._kept[key] = kept
        return kept


def _copy_of(value: Any) -> Any:
    """A copy of what is no tensor: a list, say, which may hold tensors."""
    leaves, spec = flatten_registered(value, lambda part: isinstance(part, Tensor))
    copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
    return unflatten(copies, spec)
