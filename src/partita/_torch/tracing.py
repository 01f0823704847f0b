"""Keeping Dynamo out of a function, without importing Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["untraced"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let Dynamo break the graph at ``function`` and call it, as ``torch.compiler.disable`` does."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
