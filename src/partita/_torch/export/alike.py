"""Whether two values that code is given, or returns, are sure to be the same."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

__all__ = ["COMPARABLE", "alike"]

_BY_VALUE = (
    type(None),
    bool,
    int,
    str,
    bytes,
    range,
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Values that are the same where they are of the same type and equal."""
_SYMBOLIC = (torch.SymInt, torch.SymBool, torch.SymFloat)
_BY_IDENTITY = (Tensor, type, FunctionType, BuiltinFunctionType, torch.Generator)
"""Values that are the same where they are the same object."""
COMPARABLE = (*_BY_VALUE, *_SYMBOLIC, *_BY_IDENTITY, float, complex, slice)
"""What `alike` can compare, besides lists, tuples and dicts of these."""


def alike(left: Any, right: Any) -> bool:
    """Whether two arguments, or results, are sure to be the same.

    >>> alike([1, "x", None], [1, "x", None]), alike(0.0, -0.0), alike(1, True), alike(object(), object())
    (True, False, False, False)
    """
    if isinstance(left, _BY_IDENTITY):
        return left is right
    if type(left) is not type(right):
        return False
    if isinstance(left, _BY_VALUE):
        return bool(left == right)
    if isinstance(left, (float, complex)):
        return repr(left) == repr(right)
    if isinstance(left, _SYMBOLIC):
        return bool(left.node.expr == right.node.expr)
    if isinstance(left, slice):
        return alike((left.start, left.stop, left.step), (right.start, right.stop, right.step))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(alike, left, right))
    if isinstance(left, dict):
        return alike(list(left), list(right)) and all(map(alike, left.values(), right.values()))
    return False
