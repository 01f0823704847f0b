"""Functions that remember tensors (``functools.lru_cache``), which must forget them around each pass.

A stage calls such a function where the stage before it did, and either both must compute or both must
remember, so that the recorded answers fit. What the function remembers may also be a ghost, which no other
pass may see. So the caches are empty when a pass begins and when it ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from partita._torch.modules.memoised_functions import memos

__all__ = ["discover_memos", "memos_cleared"]

_tensor_memos: dict[int, Any] = {}
"""Functions that were seen to remember tensors, by identity."""

_MOST_OBJECTS = 2000
"""How many objects are searched for tensors."""
_NOT_SEARCHED = (FunctionType, MethodType, ModuleType, type, nn.Module, str, int, float)


@contextmanager
def discover_memos() -> Iterator[None]:
    """Notice the functions that were called in this block and remember tensors at its end."""
    before = {id(memo): (memo, memo.cache_info()) for memo in memos()}
    yield
    for memo in memos():
        _, info = before.get(id(memo), (memo, None))
        if memo.cache_info() != info and _holds_tensors(memo):
            _tensor_memos[id(memo)] = memo
            memo.cache_clear()


@contextmanager
def memos_cleared() -> Iterator[None]:
    """Empty the caches of these functions when the block begins and when it ends."""
    _clear()
    try:
        yield
    finally:
        _clear()


def _clear() -> None:
    for memo in _tensor_memos.values():
        memo.cache_clear()


def _holds_tensors(memo: Any) -> bool:
    """Whether tensors are among the results that it remembers, or their arguments."""
    seen: set[int] = set()
    ahead = [memo]
    while ahead and len(seen) < _MOST_OBJECTS:
        for inner in gc.get_referents(ahead.pop()):
            if isinstance(inner, Tensor):
                return True
            if id(inner) not in seen and not isinstance(inner, _NOT_SEARCHED):
                seen.add(id(inner))
                ahead.append(inner)
    return False
