"""Tensors that are what they look like, and not a class that wraps others."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["inner_tensors", "innermost_tensors", "is_plain_tensor", "read_like", "untransformed"]

_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


def is_plain_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor, a parameter or a fake tensor, and no other subclass."""
    return type(value) in _TYPES


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that a wrapper (a quantised weight, say) is made of; None for one that wraps none."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def innermost_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that a wrapper of wrappers is made of; itself for one that wraps none."""
    inner = inner_tensors(tensor)
    return [tensor] if inner is None else [leaf for part in inner for leaf in innermost_tensors(part)]


def read_like(like: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """``memory`` as ``like`` reads its own: conjugate, or negative, where that one is so lazily."""
    view = memory.conj() if like.is_conj() else memory
    return torch._neg_view(view) if like.is_neg() else view


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that transforms of ``torch.func`` (``vmap``, ``grad``) have wrapped; itself outside."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
