"""Names: for messages, and how close two of them are."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["listed", "shared_atoms"]


def listed(names: Iterable[object], limit: int = 5) -> str:
    """Names for a message, the first few of many.

    >>> listed("abcdefg", limit=3)
    "'a', 'b', 'c' and 4 more"
    """
    found = [repr(name) for name in names]
    more = len(found) - limit
    return ", ".join(found) if more <= 0 else f"{', '.join(found[:limit])} and {more} more"


def shared_atoms(left: str, right: str) -> int:
    """How many atoms, from the first on, two qualified names have in common.

    >>> shared_atoms("layers.0.attention.weight", "layers.0.norm.weight")
    2
    """
    count = 0
    for one, other in zip(left.split("."), right.split("."), strict=False):
        if one != other:
            break
        count += 1
    return count
