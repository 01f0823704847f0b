"""When a function calls other ranks through torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["before_collectives"]


class before_collectives(TorchDispatchMode):  # noqa: N801 - a context manager that reads as a verb
    """Within this block ``tell`` is called right before each operator that exchanges anything with other
    ranks of a process group, with its name.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.endswith(("c10d", "c10d_functional")):
            self._tell(func.name())
        return func(*args, **(kwargs or {}))
