"""When a model draws random numbers from torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_map

from partita._torch.operators.schemas import operator_facts

__all__ = ["before_draws"]


class before_draws(TorchDispatchMode):  # noqa: N801 - a context manager that reads as a verb
    """Within this block ``tell`` is called right before each operator that draws random numbers, with its
    name. A function such as an LSTM with dropout runs several, and the functions that ``torch.cond`` and its
    like are given may. One that would draw, but is told not to (attention without dropout), does not count.

    >>> names = []
    >>> with before_draws(names.append):
    ...     x = torch.nn.functional.dropout(torch.ones(3), 0.5) + torch.rand(3)
    >>> names
    ['aten::bernoulli_.float', 'aten::rand']
    """

    supports_higher_order_operators = True

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__()
        self._tell = tell
        self._aside = _MatmulAsEver(self)

    def __enter__(self) -> Any:
        entered = super().__enter__()
        self._aside.__enter__()
        return entered

    def __exit__(self, *error: Any) -> None:
        self._aside.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*tree_map(self._watched, args), **tree_map(self._watched, kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not _told_not_to(func, args, kwargs or {}):
            self._tell(func.name())
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles within this block, too: ``torch.cond`` raises where it does not, and ever after."""
        return True

    def _watched(self, value: Any) -> Any:
        """A function that runs within this block, too; anything else as it is."""
        if not callable(value) or isinstance(value, torch.Tensor):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return value(*args, **kwargs)

        return call


class _MatmulAsEver(TorchFunctionMode):
    """Runs matrix products outside of a dispatch mode. They draw nothing, and where one is active, torch
    multiplies many matrices by a single one (``[2, 3, 3] @ [1, 3, 3]``) by another kernel, to other last
    bits.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # what Dynamo makes of this call comes by here when it runs
            return func(*args, **(kwargs or {}))
        if func in _MATMULS and _get_current_dispatch_mode() is self._mode:
            with _pop_mode_temporarily():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_MATMULS = {
    torch.matmul,
    torch.linalg.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
}


def _told_not_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    (facts,) = operator_facts(func)
    if facts.switch is None:
        return False
    position, name = facts.switch
    value = kwargs.get(name, args[position] if position < len(args) else False)  # by default it is off
    return value is not None and not value  # None is a dropout's training
