"""Names for messages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["listed"]


def listed(names: Iterable[object], limit: int = 5) -> str:
    """Names for a message, the first few of many.

    >>> listed("abcdefg", limit=3)
    "'a', 'b', 'c' and 4 more"
    """
    found = [repr(name) for name in names]
    more = len(found) - limit
    return ", ".join(found) if more <= 0 else f"{', '.join(found[:limit])} and {more} more"
