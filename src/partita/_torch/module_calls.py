"""Calls of single modules, seen from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["watch_calls"]


class _Watched:
    """Stands in the place of a module's own ``_call_impl``. Can be pickled and copied with its module."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        enter: Callable[[str, Any], object],
        leave: Callable[[str], object],
    ) -> None:
        self.module = module
        self.path = path
        self.enter = enter
        self.leave = leave

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.enter(self.path, (args, kwargs))
        result = type(self.module)._call_impl(self.module, *args, **kwargs)
        self.leave(self.path)
        return result


def watch_calls(
    module: nn.Module, path: str, enter: Callable[[str, Any], object], leave: Callable[[str], object]
) -> None:
    """Call ``enter(path, (args, kwargs))`` before each call of ``module``, its hooks included, and ``leave(path)`` after it
    where it has returned. The module has no hook for it, which some modules would look for.
    """
    vars(module)["_call_impl"] = _Watched(module, path, enter, leave)
