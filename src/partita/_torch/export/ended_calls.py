"""Calls of modules that end in an exception which the model catches, as ``try: layer(x, mask)`` with
``except TypeError: layer(x)`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental.proxy_tensor import _ModuleStackTracer

__all__ = ["ended_calls_forgotten"]


@contextmanager
def ended_calls_forgotten() -> Iterator[None]:
    """While ``torch.export`` traces (not strictly), take a call that an exception ends out of the record of
    calls that are under way, and don't count it. Torch leaves it there, and stumbles over it at the end of
    the call around it.
    """
    kind: Any = _ModuleStackTracer
    original = kind.call_module

    def call_module(tracer: Any, *call: Any) -> Any:
        depth = len(tracer.module_stack)
        try:
            return original(tracer, *call)
        except BaseException:
            while len(tracer.module_stack) > depth:
                _, (path, _) = tracer.module_stack.popitem()
                tracer.num_calls[path] -= 1
            raise

    kind.call_module = call_module
    try:
        yield
    finally:
        kind.call_module = original
