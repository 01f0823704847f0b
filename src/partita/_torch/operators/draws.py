"""When a model draws random numbers from torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["before_draws"]


class before_draws(TorchDispatchMode):  # noqa: N801 - a context manager that reads as a verb
    """Within this block ``tell`` is called right before each operator that draws random numbers, with its
    name. A function such as an LSTM with dropout runs several.

    >>> names = []
    >>> with before_draws(names.append):
    ...     x = torch.nn.functional.dropout(torch.ones(3), 0.5) + torch.rand(3)
    >>> names
    ['aten::bernoulli_.float', 'aten::rand']
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._tell(func.name())
        return func(*args, **(kwargs or {}))
