"""Nested values, one level at a time.

Outputs and arguments are whatever a model takes and returns: tuples, dicts, dataclasses, caches, ordinary
objects. Reading the attributes of every object finds at least as much as a registered pytree would, and needs
no registration.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from types import ModuleType
from typing import Any

import torch

__all__ = ["LEAF_TYPES", "children", "has_equality", "is_leaf", "leaves", "parts", "tensors"]

_ATOMS = (
    torch.Tensor,
    torch.nn.Module,
    torch.Generator,
    torch.fx.Node,
    torch.fx.Graph,
    type,
    ModuleType,
    Enum,
)

LEAF_TYPES = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device))
"""Leaves that are told by their type alone; most of what a module holds."""


def children(value: object) -> list[tuple[str, Any]] | None:
    """Return the parts of a container, each with the suffix that it adds to a path, or None for a leaf.

    >>> children({"logits": 1})
    [("['logits']", 1)]
    >>> children((1, 2))
    [('[0]', 1), ('[1]', 2)]
    >>> children(1.5) is None
    True
    """
    if type(value) in LEAF_TYPES or isinstance(value, _ATOMS) or callable(value):
        return None
    if isinstance(value, Mapping):
        pairs = list(value.items())  # a dict of tensors may be iterated over as a batch
        items = [(f"[{key!r}]", item) for key, item in pairs]
        return items + _attributes(value, {key for key, _ in pairs if isinstance(key, str)})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple | deque):
        return [(f"[{i}]", item) for i, item in enumerate(value)] + _attributes(value, set())
    if isinstance(value, slice):
        return [(f".{name}", getattr(value, name)) for name in ("start", "stop", "step")]
    if isinstance(value, BaseException):
        return [(f".args[{i}]", item) for i, item in enumerate(value.args)]
    # An object without attributes of its own is compared by its equality.
    return _attributes(value, set()) or None


def parts(value: object) -> Collection[Any] | None:
    """Return what `children` does without the suffixes, which take most of its time."""
    if type(value) is dict or (type(value) is OrderedDict and not vars(value)):
        return value.values()
    if type(value) is list or type(value) is tuple:
        return value
    named = children(value)
    return None if named is None else [part for _, part in named]


def has_equality(value: object) -> bool:
    """Return whether the type of ``value`` defines equality; otherwise an object equals only itself."""
    return any("__eq__" in vars(base) for base in type(value).__mro__ if base is not object)


def is_leaf(value: object) -> bool:
    """Return whether `children` finds no parts in ``value``."""
    return children(value) is None


def tensors(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Return every tensor in ``value`` with its path, in order; one that is in two places comes twice."""
    return ((where, leaf) for where, leaf in leaves(value, path) if isinstance(leaf, torch.Tensor))


def leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return every leaf in ``value`` with its path, in order."""
    yield from _leaves(value, path, set())


def _leaves(value: object, path: str, open_ids: set[int]) -> Iterator[tuple[str, Any]]:
    parts = children(value)
    if parts is None:
        yield path, value
        return
    if id(value) in open_ids:  # a cycle: its parts are being visited already
        return
    open_ids.add(id(value))
    for suffix, part in parts:
        yield from _leaves(part, path + suffix, open_ids)
    open_ids.discard(id(value))


def _attributes(value: object, already: set[str]) -> list[tuple[str, Any]]:
    names = list(getattr(value, "__dict__", ()))
    if dataclasses.is_dataclass(value):
        names += [field.name for field in dataclasses.fields(value)]
    elif not has_equality(value):
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            names += [slots] if isinstance(slots, str) else list(slots)
    wanted = [name for name in dict.fromkeys(names) if name not in already and not name.startswith("__")]
    return [(f".{name}", getattr(value, name)) for name in wanted if hasattr(value, name)]
