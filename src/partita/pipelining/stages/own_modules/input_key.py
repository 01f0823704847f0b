"""A key for each kind of inputs, so that what a stage returns is inferred once for each.

Inputs are not sent for this, so they may hold what can't be pickled, such as a mask that is a function.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from partita._torch.containers.pytree import flatten, is_node, node_children

__all__ = ["input_key"]

_COMPARABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)


def input_key(value: Any) -> Hashable:
    """Equal for values that differ in nothing but the data of their tensors.

    Functions are equal if their code and their closures are, so one that is made anew for each step is the
    same function. Of objects that hold tensors the attributes are compared, of others the identity.

    >>> input_key({"x": torch.zeros(2)}) == input_key({"x": torch.ones(2)})
    True
    >>> input_key({"x": torch.zeros(2)}) == input_key({"x": torch.zeros(3)})
    False
    """
    return _key(value, ())


def _key(value: Any, above: tuple[int, ...]) -> Hashable:
    """``above``: the identities of the values that this one is in."""
    kind = type(value)
    if isinstance(value, Tensor):
        layout = tuple(value.stride()) if value.layout is torch.strided else value.layout
        return kind, tuple(value.shape), layout, value.dtype, value.requires_grad
    if isinstance(value, _COMPARABLE):
        return kind, value
    if id(value) in above:
        return "above", above.index(id(value))
    above = (*above, id(value))
    if isinstance(value, FunctionType):
        captured = [_cell_value(cell) for cell in value.__closure__ or ()]
        parts = [*captured, value.__defaults__, value.__kwdefaults__]
        return kind, value.__code__, tuple(_closure_key(part, above) for part in parts)
    if kind is partial or isinstance(value, MethodType):
        parts = [value.func, value.args, value.keywords] if kind is partial else [value.__func__]
        owner = _ObjectKey(value.__self__) if isinstance(value, MethodType) else None
        return kind, owner, tuple(_key(part, above) for part in parts)
    if is_node(value):
        children, context = node_children(value)
        return kind, repr(context), tuple(_key(child, above) for child in children)
    if _holds_tensors(value):
        attributes = sorted(vars(value).items())
        return kind, tuple((name, _key(item, above)) for name, item in attributes)
    leaves, spec = flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return _ObjectKey(value)
    return kind, spec, tuple(_key(leaf, above) for leaf in leaves)


def _closure_key(value: Any, above: tuple[int, ...]) -> Hashable:
    """The key of what a closure holds. That may be a whole program, so only simple types are looked into."""
    opened = (*_COMPARABLE, Tensor, FunctionType, MethodType, partial, tuple, list, dict)
    return _key(value, above) if isinstance(value, opened) else _ObjectKey(value)


def _cell_value(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def _holds_tensors(value: Any) -> bool:
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, Mapping) or callable(value):
        return False
    return any(isinstance(item, Tensor) for item in attributes.values())


class _ObjectKey:
    """A key for an object: equal for the same object, and where its class has ``__eq__`` and a hash."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value  # kept, so that no other object gets its identity

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ObjectKey) or type(self._value) is not type(other._value):
            return False
        by_value = type(self._value).__hash__ is not None
        return self._value is other._value or (by_value and bool(self._value == other._value))

    def __hash__(self) -> int:
        return hash(type(self._value))
