"""What a call of a torch function returned, without data, so that the code that called it can run elsewhere.

::

    y = x.relu()          ("relu",    NewTensor([4, 8], float32))   a new tensor: shape, strides and dtype
    y.add_(1)             ("add_",    NumberedTensor(17))           one that the pass has met before
    n = int(y.sum())      ("__int__", 42)                           anything else as it is
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from partita._torch.fake.ghosts import ghost_of
from partita._torch.tensors.tensor_text import short_name
from partita.errors import ExecutionError

__all__ = [
    "Answer",
    "AutogradNode",
    "NewTensor",
    "NumberedTensor",
    "Opaque",
    "RaisedError",
    "StageDevice",
    "all_tensors",
    "map_leaves",
    "picklable",
    "tensors_in",
]

Answer = tuple[str, Any, Any]
"""The function's name; what it returned; the new looks of arguments whose shape or dtype it changed, by
number."""

_NO_STAND_IN = "and a stage that starts behind it can't stand in for one"
_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that the call has made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> NewTensor:
        """Return what ``tensor`` looks like."""
        strides = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
        return cls(tuple(tensor.shape), strides, tensor.dtype)

    def ghost(self) -> Tensor:
        """Return a tensor without memory that looks like this.

        Raises:
            ExecutionError: it is sparse, nested or quantised.
        """
        if len(self.stride) != len(self.shape):
            raise ExecutionError(
                f"the model makes or takes a sparse or nested tensor {self.shape} before a cut, "
                f"{_NO_STAND_IN}: make it a buffer, which each stage has, or dense (to_dense(), "
                "to_padded_tensor()), or cut before it is made"
            )
        if self.dtype in _QUANTISED:
            raise ExecutionError(
                f"the model makes or takes a quantised tensor {self.shape} ({short_name(self.dtype)}) before "
                f"a cut, {_NO_STAND_IN}: cut before the first one is made, or leave the model whole"
            )
        return ghost_of(self.shape, self.stride, self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return NewTensor, (self.shape, self.stride, self.dtype)


@dataclass(slots=True, eq=False)
class NumberedTensor:
    """A tensor that the pass had met before the call. See `NumberedTensors`."""

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        return NumberedTensor, (self.number,)


class StageDevice:
    """The device of the stage that called; on a stage that replays the call, its own device."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Opaque:
    """Stands for something that can't go to another process, such as the handle of a hook."""

    what: str

    def __reduce__(self) -> tuple[Any, ...]:
        return Opaque, (self.what,)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ExecutionError(
            f"the model uses {name!r} of a {self.what} that an earlier stage has made, which stays there: "
            "cut so that one stage makes and uses it"
        )


class AutogradNode(Opaque):
    """Stands for the ``grad_fn`` of a tensor, whose name is all that can be said of it elsewhere."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return AutogradNode, (self.what,)

    def name(self) -> str:
        """Return what the node calls itself."""
        return self.what


@dataclass(slots=True, eq=False)
class RaisedError:
    """The exception that the call raised."""

    error: Exception

    def __reduce__(self) -> tuple[Any, ...]:
        return RaisedError, (self.error,)


class HookHandle(Opaque):
    """Stands for the handle of a hook."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return HookHandle, (self.what,)


_PICKLED_AS_IS = frozenset(
    {int, float, bool, str, complex, bytes, type(None), torch.dtype, torch.Size, torch.layout}
    | {torch.memory_format, range, slice, type(Ellipsis)}
)


def picklable(leaf: Any, device: torch.device) -> Any:
    """Return a leaf that is no tensor as it goes to another process.

    Args:
        device: of the stage.
    """
    if type(leaf) in _PICKLED_AS_IS:
        return leaf
    if isinstance(leaf, torch.device):
        return StageDevice() if leaf == device else leaf
    if (
        type(leaf).__module__ == "numpy"
        and hasattr(leaf, "dtype")
        and not getattr(leaf.dtype, "hasobject", False)
    ):
        return leaf.copy()  # its memory may be a tensor's
    if isinstance(leaf, Node):
        return AutogradNode(leaf.name())
    return (HookHandle if isinstance(leaf, RemovableHandle) else Opaque)(type(leaf).__name__)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with each leaf in its tuples, lists and dicts replaced. Named tuples and torch's
    return types keep their class.
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


def all_tensors(
    value: Any, depth: int = 6, leave_out: Callable[[Any], bool] | None = None
) -> Iterator[Tensor]:
    """The tensors in a result of any class, its attributes included.

    Args:
        leave_out: says which objects are not searched.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if leave_out is not None and leave_out(value):
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple, set)):
        items = value
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        items = vars(value).values()
    for item in items if depth else ():
        yield from all_tensors(item, depth - 1, leave_out)
