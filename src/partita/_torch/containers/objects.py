"""Objects that torch's pytree does not know, opened so that the tensors inside are leaves.

A model may return an object of any class: a dataclass, a cache with a list of layers. torch's pytree takes
one that nobody has registered for a leaf, and export refuses it. Registering the class would change what the
rest of the user's program sees, so such an object is put into a node of partita's own::

    Cache(layers=[Layer(keys=<Tensor>, values=<Tensor>)])

    Opened  content: everything but the tensors, as bytes      leaves: [keys, values]

Flattening gives the leaves; unflattening gives an object of the user's class again, not an `Opened`.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from partita._torch.containers.containers import content_of, fill, kind_of

__all__ = ["open_objects"]

_LEAVES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_KEPT = (
    type,
    Enum,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    torch.nn.Module,
    torch.Generator,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_PRIMITIVES = (type(None), bool, int, float, complex, str, bytes)


def open_objects(tree: Any) -> Any:
    """``tree``, where each object of a class that pytree does not know is an `Opened`.

    An object that can't be taken apart (one that can't be pickled, tensors aside) stays as it is.

    >>> class Pair:
    ...     def __init__(self, left, right):
    ...         self.left, self.right = left, right
    >>> leaves, spec = pytree.tree_flatten(open_objects({"pair": Pair(torch.zeros(2), 5)}))
    >>> leaves
    [tensor([0., 0.])]
    >>> pytree.tree_unflatten([torch.ones(2)], spec)["pair"].left
    tensor([1., 1.])
    """
    leaves, spec = pytree.tree_flatten(tree)
    if not any(map(_is_object, leaves)):
        return tree
    return pytree.tree_unflatten([_opened(leaf) if _is_object(leaf) else leaf for leaf in leaves], spec)


@dataclass(slots=True, eq=False, repr=False)
class Opened:
    """An object in two parts, registered with pytree.

    Args:
        content: everything but the tensors (and symbolic numbers).
        leaves: these, in the order in which they are met.
    """

    content: Content
    leaves: list[Any]


@dataclass(slots=True, eq=False, repr=False)
class Content:
    """An object without its tensors. It never changes; two are equal where they are built alike and hold
    equal values.

    Args:
        data: the object as bytes, which refer to leaves and kept values by number.
        kept: what stands in it by reference: classes, functions, modules.
        name: of the object's class, for messages.
    """

    data: bytes
    kept: tuple[Any, ...]
    name: str

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Content)
            and self.data == other.data
            and len(self.kept) == len(other.kept)
            and all(mine is its or mine == its for mine, its in zip(self.kept, other.kept, strict=True))
        )

    def __hash__(self) -> int:
        return hash(self.data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Content:
        return self

    def __repr__(self) -> str:
        return self.name


def _is_object(leaf: Any) -> bool:
    return not isinstance(leaf, _LEAVES + _PRIMITIVES + _KEPT) and not callable(leaf)


def _opened(value: Any) -> Any:
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return value
    return Opened(Content(stream.getvalue(), tuple(pickler.kept), type(value).__name__), pickler.leaves)


class _Pickler(pickle.Pickler):
    """Pickles an object; tensors, and what is kept by reference, are replaced by numbers."""

    dispatch_table = copyreg.dispatch_table

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.leaves: list[Any] = []
        self.kept: list[Any] = []
        self._places: dict[int | torch.device, tuple[bool, int]] = {}

    def persistent_id(self, value: Any) -> tuple[bool, int] | None:
        leaf = isinstance(value, _LEAVES)
        if not leaf and not isinstance(value, _KEPT):
            return None
        # In torch 2.11 ``tensor.device`` is another object each time.
        key = value if isinstance(value, torch.device) else id(value)
        if key not in self._places:
            table = self.leaves if leaf else self.kept
            table.append(value)
            self._places[key] = (leaf, len(table) - 1)
        return self._places[key]

    def reducer_override(self, value: Any) -> Any:
        """Let a user's ``dict`` or ``list`` be filled past its own methods, which may refuse."""
        kind, cls = kind_of(value), type(value)
        if kind not in (OrderedDict, dict, list) or cls is kind or not _reduced_like(cls, kind):
            return NotImplemented
        state = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2]
        if state is not None and type(state) is not dict:
            return NotImplemented
        return copyreg.__newobj__, (cls,), (content_of(value), state or {}), None, None, _fill  # type: ignore[attr-defined]


def _reduced_like(cls: type, kind: type) -> bool:
    """Whether a subclass leaves it to Python how it is pickled."""
    origins = {"__reduce_ex__": object, "__reduce__": kind, "__getstate__": object}
    kept = all(getattr(cls, name) is getattr(origin, name) for name, origin in origins.items())
    return kept and not hasattr(cls, "__setstate__")


def _fill(value: Any, parts: tuple[list[Any], dict[str, Any]]) -> None:
    content, attributes = parts
    fill(value, content)
    if attributes:
        vars(value).update(attributes)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: Content, leaves: list[Any]) -> None:
        super().__init__(io.BytesIO(content.data))
        self._tables = (content.kept, leaves)

    def persistent_load(self, pid: tuple[bool, int]) -> Any:
        leaf, number = pid
        return self._tables[leaf][number]


def _flatten(opened: Opened) -> tuple[list[Any], Content]:
    return opened.leaves, opened.content


def _flatten_with_keys(opened: Opened) -> tuple[list[tuple[pytree.KeyEntry, Any]], Content]:
    return [(pytree.SequenceKey(number), leaf) for number, leaf in enumerate(opened.leaves)], opened.content


def _unflatten(leaves: Iterable[Any], content: Content) -> Any:
    return _Unpickler(content, list(leaves)).load()


pytree.register_pytree_node(
    Opened,
    _flatten,
    _unflatten,
    serialized_type_name="partita.Opened",
    flatten_with_keys_fn=_flatten_with_keys,
)
