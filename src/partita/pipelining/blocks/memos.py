"""Functions that remember tensors (``functools.lru_cache``), which a pass through a model must not find.

A stage calls such a function where the stage before it did, and both must compute or both remember. What it
remembers there may be a ghost, which nobody else may get. So each pass starts with nothing remembered, and
leaves nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from partita._torch.modules.memoised_functions import memos

__all__ = ["memos_found", "nothing_remembered"]

_known: dict[int, Any] = {}
"""Those that were seen to remember tensors, by identity."""

_MOST = 2000
"""Objects that are looked at for tensors."""
_CLOSED = (FunctionType, MethodType, ModuleType, type, nn.Module, str, int, float)


@contextmanager
def memos_found() -> Iterator[None]:
    """Notice which functions that are called in this block remember tensors afterwards."""
    before = {id(memo): (memo, memo.cache_info()) for memo in memos()}
    yield
    for memo in memos():
        _, info = before.get(id(memo), (memo, None))
        if memo.cache_info() != info and _holds_tensors(memo):
            _known[id(memo)] = memo
            memo.cache_clear()


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """In this block these functions start anew; afterwards, too."""
    _clear()
    try:
        yield
    finally:
        _clear()


def _clear() -> None:
    for memo in _known.values():
        memo.cache_clear()


def _holds_tensors(memo: Any) -> bool:
    """Whether tensors are among what it remembers, or what it is called with."""
    seen: set[int] = set()
    ahead = [memo]
    while ahead and len(seen) < _MOST:
        for inner in gc.get_referents(ahead.pop()):
            if isinstance(inner, Tensor):
                return True
            if id(inner) not in seen and not isinstance(inner, _CLOSED):
                seen.add(id(inner))
                ahead.append(inner)
    return False
