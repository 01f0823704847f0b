"""The functions that remember their results (``functools.lru_cache``) in this process."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import Any

__all__ = ["memos"]

_KIND: Any = functools._lru_cache_wrapper


class _Census:
    """To look through all objects takes long; so it is done again only where some were made or are gone."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[Any]] = []
        self._references = 0

    def taken(self) -> list[Any]:
        found = [memo for reference in self._found if (memo := reference()) is not None]
        # each of them refers to its type
        if len(found) < len(self._found) or sys.getrefcount(_KIND) != self._references:
            found = [value for value in gc.get_referrers(_KIND) if type(value) is _KIND]
            self._found = [weakref.ref(memo) for memo in found]
            self._references = sys.getrefcount(_KIND)
        return found


_census = _Census()


def memos() -> list[Any]:
    """All of them, torch's own among them.

    >>> double = functools.lru_cache(lambda number: 2 * number)
    >>> any(memo is double for memo in memos())
    True
    """
    return _census.taken()
