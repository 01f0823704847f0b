"""When a model draws random numbers from torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.operators.schemas import operator_facts

__all__ = ["before_draws"]


class before_draws(TorchDispatchMode):  # noqa: N801 - a context manager that reads as a verb
    """Within this block ``tell`` is called right before each operator that draws random numbers, with its
    name. A function such as an LSTM with dropout runs several. One that would draw, but is told not to
    (attention without dropout), does not count.

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
        if torch.Tag.nondeterministic_seeded in func.tags and not _told_not_to(func, args, kwargs or {}):
            self._tell(func.name())
        return func(*args, **(kwargs or {}))


def _told_not_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    (facts,) = operator_facts(func)
    if facts.switch is None:
        return False
    position, name = facts.switch
    value = kwargs.get(name, args[position] if position < len(args) else False)  # by default it is off
    return value is not None and not value  # None is a dropout's training
