"""Functions under ``torch.jit.script`` in a model that is traced.

Once one has run, TorchScript keeps an optimised plan for it, which cuts what it is given off its history: a
tracer records a ``detach``, and gradients end there. So while a model is traced, the Python function that was
compiled is called in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from partita._torch.containers.replaced import replaced

__all__ = ["script_functions_in_python"]

_PYTHON = "_torchdynamo_inline"
"""Where ``torch.jit.script`` keeps the Python function, for Dynamo."""


@contextmanager
def script_functions_in_python() -> Iterator[None]:
    """While ``torch.export`` traces, call the Python functions behind those of ``torch.jit.script``."""
    kind: Any = torch.jit.ScriptFunction
    original = vars(kind)["__call__"]  # which binds, as what looking it up returns does not

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self, _PYTHON, None)
        if function is None or get_proxy_mode() is None:
            return original.__get__(self)(*args, **kwargs)
        return function(*args, **kwargs)

    with replaced(kind, "__call__", call):
        yield
