"""What a call of a torch function answered, without data: so that the same code can run elsewhere.

::

    y = x.relu()              ("relu",    New([4, 8], float32))     a tensor: its shape, strides and dtype
    y.add_(1)                 ("add_",    Known(17))                a tensor that is known by its number
    n = int(y.sum())          ("__int__", 42)                       anything else as it is
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from partita.errors import ExecutionError

__all__ = ["Answer", "Home", "Known", "New", "Opaque", "RaisedHere", "map_leaves", "plain", "tensors_in"]

Answer = tuple[str, Any, Any]
"""The function's name; what it returned; what of its arguments has another shape or dtype now, by number."""


class New:
    """A tensor that the call has made."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.stride = stride
        self.dtype = dtype

    @classmethod
    def of(cls, tensor: Tensor) -> New:
        """What ``tensor`` looks like."""
        return cls(tuple(tensor.shape), _strides(tensor), tensor.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return New, (self.shape, self.stride, self.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, New) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.shape, self.stride, self.dtype


class Known:
    """A tensor that was known before the call."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Known, (self.number,)


class Home:
    """The device of the stage that answered; where it is read, that of the one that reads."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Home, ()


class Opaque:
    """Stands for something that can't go to another process, such as the handle of a hook."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return Opaque, (self.what,)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ExecutionError(
            f"the model uses {name!r} of a {self.what} that an earlier stage has made, which stays there: "
            "cut so that one stage makes and uses it"
        )


class RaisedHere:
    """The call raised this."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return RaisedHere, (self.error,)


_PLAIN = frozenset(
    {int, float, bool, str, complex, bytes, type(None), torch.dtype, torch.Size, torch.layout}
    | {torch.memory_format, range, slice, type(Ellipsis)}
)


def plain(leaf: Any, home: torch.device) -> Any:
    """A leaf that is no tensor, as it goes to another process."""
    if type(leaf) in _PLAIN:
        return leaf
    if isinstance(leaf, torch.device):
        return Home() if leaf == home else leaf
    if (
        type(leaf).__module__ == "numpy"
        and hasattr(leaf, "dtype")
        and not getattr(leaf.dtype, "hasobject", False)
    ):
        return leaf.copy()  # its memory may be a tensor's
    return Opaque(type(leaf).__name__)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with what is in tuples, lists and dicts replaced; named tuples and torch's return types stay
    what they are.
    """
    kind = type(value)
    if kind is tuple:
        return tuple([map_leaves(function, item) for item in value])
    if kind is list:
        return [map_leaves(function, item) for item in value]
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and kind is not torch.Size:
        items = [map_leaves(function, item) for item in value]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return function(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of a function, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            if isinstance(item, Tensor):
                yield item
            elif isinstance(item, (tuple, list, dict)):
                yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout == torch.strided else ()
