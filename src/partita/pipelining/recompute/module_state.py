"""What a module holds at one moment, so that it can run again from there and leave no trace.

A forward pass may count microbatches, keep running statistics, append to a list. When it runs again, it must
find all of that as the first run found it, and what it writes must not be seen::

    n = 0   F of microbatch 0   n = 1   F of microbatch 1   n = 2   B of microbatch 0: with n = 0   n = 2
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.modules.contents import named_tables
from partita.errors import ExecutionError

__all__ = ["ModuleState"]

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that every module has."""
_CONTAINERS = (list, dict, set, OrderedDict, deque)
_OTHERS = (Tensor, nn.Module, FunctionType, MethodType, ModuleType, type, torch.Generator)


class ModuleState:
    """The parameters, buffers and plain attributes of a module and of those within it, as they are now.

    Tensors are remembered, not copied; lists, dicts, sets and deques are copied, as deep as they are nested.

    Args:
        module: of a captured graph only tensors are looked at: it has no other state.

    Attributes:
        tensors: by qualified name.

    >>> module = nn.Identity()
    >>> module.calls = 0
    >>> before = ModuleState(module)
    >>> module.calls += 1
    >>> with before.restored({}):
    ...     print(module.calls)
    0
    >>> module.calls
    1
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._tables: list[_Table] = []
        self._objects: dict[str, tuple[object, Any]] = {}
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        for path, child in module.named_modules():
            for content in (*named_tables(child), vars(child)):
                table = _Table(content, tensors_only=isinstance(child, GraphModule))
                self._tables.append(table)
                for key, value in table.before.items():
                    self._look_at(f"{path}.{key}" if path else key, value)

    def _look_at(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors[name] = value
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif _has_attributes(value):
            self._objects[name] = value, _renewed(vars(value), {}, {})

    def check_objects(self, where: str) -> None:
        """Raise ExecutionError where an object that a module holds is no longer as it was then: it can't be
        put back.
        """
        for name, (value, before) in self._objects.items():
            if not _same(before, vars(value)):
                raise ExecutionError(
                    f"{where} changes self.{name} ({type(value).__name__}) in its forward pass, which can't "
                    "be undone to run it again: keep a number, a list or a buffer in its place, or take "
                    f"{where} out of recompute"
                )

    @contextmanager
    def restored(self, instead: Mapping[int, Tensor]) -> Iterator[None]:
        """In this block the modules hold what they held then; afterwards what they hold now.

        Args:
            instead: tensors that take the places of others, by their ``id``.
        """
        now = [(table, table.own()) for table in self._tables]
        states = [(generator, generator.get_state()) for generator, _ in self._generators]
        renewed: dict[int, Any] = {}
        for table in self._tables:
            table.put({key: _renewed(value, instead, renewed) for key, value in table.before.items()})
        for generator, state in self._generators:
            generator.set_state(state)
        try:
            yield
        finally:
            for table, content in now:
                table.put(content)
            for generator, state in states:
                generator.set_state(state)


class _Table:
    """One of the dicts in which a module keeps its attributes.

    Attributes:
        before: what it had when this was made.
    """

    __slots__ = ("_content", "_tensors_only", "before")

    def __init__(self, content: dict[str, Any], *, tensors_only: bool) -> None:
        self._content = content
        self._tensors_only = tensors_only
        self.before = {key: _renewed(value, {}, {}) for key, value in self.own().items()}

    def own(self) -> dict[str, Any]:
        """What a forward pass may change in it."""
        return {
            key: value
            for key, value in self._content.items()
            if key not in _OF_TORCH
            and (isinstance(value, Tensor) or not (self._tensors_only or isinstance(value, nn.Module)))
        }

    def put(self, content: Mapping[str, Any]) -> None:
        for key in self.own().keys() - content.keys():
            del self._content[key]
        self._content.update(content)


def _has_attributes(value: Any) -> bool:
    """Whether it is an object of a class of the user's, which a forward pass may change."""
    if isinstance(value, (*_OTHERS, *_CONTAINERS)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "partita", "builtins", "functools")


def _renewed(value: Any, instead: Mapping[int, Tensor], copies: dict[int, Any]) -> Any:
    """``value`` with new containers; what was one object stays one."""
    if isinstance(value, Tensor):
        return instead.get(id(value), value)
    kind = type(value)
    if kind not in _CONTAINERS and kind is not tuple:
        return value
    if id(value) in copies:
        return copies[id(value)]
    if kind is tuple:
        return tuple(_renewed(item, instead, copies) for item in value)
    copy = copies[id(value)] = kind()
    if issubclass(kind, dict):
        copy.update((key, _renewed(item, instead, copies)) for key, item in value.items())
    elif kind is set:
        copy.update(value)
    else:
        copy.extend(_renewed(item, instead, copies) for item in value)
        if kind is deque:
            copy = copies[id(value)] = deque(copy, value.maxlen)
    return copy


def _same(left: Any, right: Any) -> bool:
    """Whether two values are one object, or containers of the same."""
    if left is right:
        return True
    if type(left) is not type(right) or type(left) not in (*_CONTAINERS, tuple):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(item, right[key]) for key, item in left.items())
    if isinstance(left, set):
        return bool(left == right)
    return len(left) == len(right) and all(map(_same, left, right))
