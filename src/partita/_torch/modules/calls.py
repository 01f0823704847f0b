"""Calls of single modules, seen from outside."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, TypeAlias

import torch.utils.checkpoint
from torch import nn
from torch.autograd import Function

__all__ = [
    "Around",
    "Enter",
    "calls_watched",
    "function_kinds",
    "inside_of_checkpoint",
    "inside_of_function",
    "inside_of_transform",
    "overridden_calls",
    "watch_calls",
]

Around: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Takes the call of a module and returns its result, whether or not it makes the call."""
Enter: TypeAlias = Callable[[str, Any], Around | None]
"""Takes the module's path and its arguments; may return what goes around the call."""


@dataclass(eq=False)
class _Watched:
    """Stands in the place of a module's own ``_call_impl``. Can be pickled and copied with its module."""

    module: nn.Module
    path: str
    enter: Enter
    leave: Callable[[str], object]
    outside: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = partial(type(self.module)._call_impl, self.module)
        return inner(*args, **kwargs) if self.outside else self.call(inner, args, kwargs)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the module by way of ``function``."""
        around = self.enter(self.path, (args, kwargs))
        call = partial(function, *args, **kwargs)
        result = call() if around is None else around(call)
        self.leave(self.path)
        return result


def watch_calls(module: nn.Module, path: str, enter: Enter, leave: Callable[[str], object]) -> None:
    """Call ``enter(path, (args, kwargs))`` before each call of ``module``, its hooks included, and
    ``leave(path)`` after it where it has returned. The module has no hook for it, which some modules would
    look for. Where ``enter`` returns a function, that is given the call in place of being made, and returns
    the result.
    """
    vars(module)["_call_impl"] = _Watched(module, path, enter, leave)


def overridden_calls(model: nn.Module) -> list[type]:
    """The classes of its modules that have a ``__call__`` of their own, such as one that checkpoints."""
    kinds: dict[type, None] = {}
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind is nn.Module:
                break
            if "__call__" in vars(kind):
                kinds[kind] = None
    return list(kinds)


@contextmanager
def calls_watched(kinds: Iterable[type]) -> Iterator[None]:
    """In this block, what `watch_calls` calls is called around these classes' own ``__call__``."""
    with ExitStack() as stack:
        for kind in kinds:
            stack.callback(setattr, kind, "__call__", vars(kind)["__call__"])
            setattr(kind, "__call__", _around(vars(kind)["__call__"]))  # noqa: B010
        yield


def _around(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watched = vars(self).get("_call_impl")
        if not isinstance(watched, _Watched) or watched.outside:
            return own(self, *args, **kwargs)
        watched.outside = True
        try:
            return watched.call(partial(own, self), args, kwargs)
        finally:
            watched.outside = False

    return call


def inside_of_checkpoint() -> bool:
    """Whether the caller's caller runs within ``torch.utils.checkpoint``."""
    return any(code.co_filename == torch.utils.checkpoint.__file__ for code in _callers())


def inside_of_function() -> bool:
    """Whether this runs within the ``forward`` of a ``torch.autograd.Function``. (Since torch 2.14 no Python
    of torch's calls it, which a frame would show.)
    """
    forwards = {getattr(kind.forward, "__code__", None) for kind in function_kinds()}
    return any(code in forwards for code in _callers())


def function_kinds() -> list[type[Function]]:
    """Every class of ``torch.autograd.Function`` that there is now, parents first."""
    kinds: list[type[Function]] = [Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return list(dict.fromkeys(kinds))


def _callers() -> Iterator[CodeType]:
    """The code of the function that asks, and of all around it."""
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back  # type: ignore[assignment]


def inside_of_transform() -> bool:
    """Whether this runs within a transform of ``torch.func`` (``vmap``, ``grad``, ``jacrev``).

    >>> inside_of_transform()
    False
    >>> torch.func.grad(lambda x: x * inside_of_transform())(torch.ones(()))
    tensor(1.)
    """
    return torch._C._functorch.peek_interpreter_stack() is not None
