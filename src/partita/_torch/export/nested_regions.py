"""Functions that are marked with ``torch.compiler.nested_compile_region``, in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from partita._torch.containers.replaced import replaced

__all__ = ["nested_regions_are_called"]

_MODULE: Any = import_module("torch._higher_order_ops.invoke_subgraph")
"""Its package has an operator of the same name."""


@contextmanager
def nested_regions_are_called() -> Iterator[None]:
    """Call marked functions as they are, as eager code does: the mark is for compilers.

    Export would have Dynamo compile each of them. Where Dynamo has met one while a dispatch mode was on, it
    leaves that alone for the rest of the process, and every later trace calls itself without end. And what it
    makes of them can't be cut.
    """
    with replaced(_MODULE, "invoke_subgraph_placeholder", _call):
        yield


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
