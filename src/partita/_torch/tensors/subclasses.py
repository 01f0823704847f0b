"""Tensors that are what they look like, and not a class that wraps others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "TensorParts",
    "inner_tensors",
    "innermost_tensors",
    "is_plain_tensor",
    "read_like",
    "tensor_parts",
    "untransformed",
    "with_class_of",
]

_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


def is_plain_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor, a parameter or a fake tensor, and no other subclass."""
    return type(value) in _TYPES


@dataclass(frozen=True, slots=True)
class TensorParts:
    """What a wrapper (a quantised weight, say) is made of: tensors by the names of its attributes, and what
    else its class needs to make it of them.
    """

    tensors: dict[str, torch.Tensor]
    context: Any


def tensor_parts(tensor: torch.Tensor) -> TensorParts | None:
    """The parts of a wrapper; None for a tensor that wraps none."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    return TensorParts({name: getattr(tensor, name) for name in names}, context)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that a wrapper is made of; None for one that wraps none."""
    parts = tensor_parts(tensor)
    return None if parts is None else list(parts.tensors.values())


def innermost_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that a wrapper of wrappers is made of; itself for one that wraps none."""
    inner = inner_tensors(tensor)
    return [tensor] if inner is None else [leaf for part in inner for leaf in innermost_tensors(part)]


def with_class_of(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """``memory`` as an object of the class of ``tensor``, with its attributes: a quantised weight may have a
    scale that its layer reads. Itself where the class is torch's, or wraps tensors or runs operators.

    >>> class Scaled(torch.nn.Parameter):
    ...     scale = 1
    >>> weight = Scaled(torch.ones(2))
    >>> weight.scale = 8
    >>> with_class_of(weight, torch.nn.Parameter(torch.empty(2, device="meta"))).scale
    8
    """
    kind = type(tensor)
    runs_operators = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if kind in _TYPES or runs_operators or is_lazy(tensor):
        return memory
    result: torch.Tensor = torch.Tensor._make_subclass(kind, memory.detach(), memory.requires_grad)
    vars(result).update(vars(tensor))
    return result


def read_like(like: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """``memory`` as ``like`` reads its own: conjugate, or negative, where that one is so lazily."""
    view = memory.conj() if like.is_conj() else memory
    return torch._neg_view(view) if like.is_neg() else view


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that transforms of ``torch.func`` (``vmap``, ``grad``) have wrapped; itself outside."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
