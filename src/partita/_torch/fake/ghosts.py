"""Tensors that are not there yet, and the functions of torch that a model calls on them.

A *ghost* has the shape, strides and dtype of a tensor whose values another process has computed, and no
memory. Later it may become that tensor, for everybody who holds it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "FunctionKind",
    "become",
    "caller",
    "describe_function",
    "ghost_of",
    "is_ghostly",
    "past_dispatch_modes",
    "referenced_by_python",
    "undisturbed",
]

undisturbed = torch._C.DisableTorchFunction
"""Within this block calls go straight to torch, past all function modes."""

past_dispatch_modes = _disable_current_modes
"""Within this block calls go past all dispatch modes, as that of a tracer which the model has begun."""


class FunctionKind(Enum):
    """What a function looks at."""

    VALUES = 1
    """Values, or what a ghost does not know."""
    METADATA = 2
    """What a ghost knows as well as its tensor."""
    DEVICE = 3
    """On which device a tensor lies."""
    SETTING = 4
    """No values: it changes or reads how torch works."""


_PROPERTIES = (
    *("shape", "dtype", "ndim", "layout", "itemsize", "nbytes", "names", "is_sparse", "is_quantized"),
    *("is_nested", "is_mkldnn", "is_sparse_csr"),
)
_METADATA = frozenset(
    (
        *(f"{name}.__get__" for name in _PROPERTIES),
        *("size", "dim", "stride", "numel", "nelement", "ndimension", "element_size", "is_contiguous"),
        *("is_floating_point", "is_complex", "is_signed", "__len__", "storage_offset", "__hash__"),
    )
)
_DEVICE = frozenset(
    f"{name}.__get__" for name in ("device", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu")
)
_SETTINGS = frozenset(
    (
        *("_set_grad_enabled", "_enter_autocast", "_exit_autocast"),
        *("_record_function_enter_new", "_record_function_exit._RecordFunction"),  # a label for the profiler
        "_backward_hooks.__set__",  # of torch itself, where a custom Function has marked its input as dirty
    )
)
_descriptions: dict[Any, tuple[FunctionKind, str]] = {}


def describe_function(function: Callable[..., Any]) -> tuple[FunctionKind, str]:
    """What a function that a mode has caught looks at, and its name.

    >>> describe_function(torch.Tensor.shape.__get__)
    (<FunctionKind.METADATA: 2>, 'shape.__get__')
    """
    description = _descriptions.get(function)
    if description is None:
        name = getattr(function, "__name__", None) or str(function)
        if name in ("__get__", "__set__", "__delete__"):
            name = f"{getattr(getattr(function, '__self__', None), '__name__', '')}.{name}"
        kind = FunctionKind.VALUES
        if name in _METADATA:
            kind = FunctionKind.METADATA
        elif name in _DEVICE:
            kind = FunctionKind.DEVICE
        elif name in _SETTINGS:
            kind = FunctionKind.SETTING
        description = _descriptions[function] = kind, name
    return description


def ghost_of(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape, stride and dtype without memory."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def is_ghostly(tensor: Tensor) -> bool:
    """Whether a tensor has no memory. What torch makes nested tensors with (of jagged rows) has none either,
    and is its own.
    """
    return tensor.is_meta and not tensor.is_nested


def become(ghost: Tensor, tensor: Tensor) -> None:
    """Swap what the two objects are: whoever refers to ``ghost`` has the values of ``tensor`` from now on.

    Args:
        tensor: one that nothing else refers to, autograd included, such as a view made for this call.
    """
    torch._C._swap_tensor_impl(ghost, tensor)


def referenced_by_python(references: Sequence[weakref.ref[Tensor]]) -> list[Tensor | None]:
    """Return those tensors that something in Python refers to (a variable, a list, a call under way); None in
    place of those that are gone or that only autograd keeps.

    All references of torch's own objects to a tensor count as one reference. Where a version of torch counts
    otherwise, every tensor that is not gone is returned.
    """
    referenced: list[Tensor | None] = []
    for reference in references:
        tensor = reference()
        if tensor is not None and _references(tensor) <= _FREE:
            tensor = None
        referenced.append(tensor)
    return referenced


def _references(tensor: Tensor) -> int:
    return sys.getrefcount(tensor) - (tensor._use_count() > 1)  # type: ignore[attr-defined]


def _count_when_free() -> int:
    """Return what `_references` gives in `referenced_by_python` for a tensor that only autograd keeps; -1
    where that can't be told.
    """
    with torch.enable_grad(), undisturbed():
        start = torch.ones(1, device="cpu", requires_grad=True)
        free, kept = start * 2, start * 2
        graphs = [free * free, kept * kept, kept.exp()]
        references = [weakref.ref(free), weakref.ref(kept)]
        del free
        counts = []
        for reference in references:
            tensor = reference()
            counts.append(-1 if tensor is None else _references(tensor))
    return counts[0] if counts[0] + 1 == counts[1] and graphs else -1


_FREE = _count_when_free()


def caller(depth: int) -> FrameType | None:
    """Return the frame ``depth`` calls above the caller of this function."""
    return sys._getframe(depth + 1)
