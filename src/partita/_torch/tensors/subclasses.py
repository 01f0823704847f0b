"""Tensors that are what they look like, and not a class that wraps others."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["is_plain_tensor", "read_like"]

_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


def is_plain_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor, a parameter or a fake tensor, and no other subclass."""
    return type(value) in _TYPES


def read_like(like: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """``memory`` as ``like`` reads its own: conjugate, or negative, where that one is so lazily."""
    view = memory.conj() if like.is_conj() else memory
    return torch._neg_view(view) if like.is_neg() else view
