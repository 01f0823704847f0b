"""Lists of names for messages, and how much of their names two modules share."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["first_few", "listed", "shared_atoms"]


def first_few(names: Iterable[str], limit: int = 5) -> str:
    """Join the first few names, and say how many there are besides.

    >>> first_few("abcdefg", limit=3)
    'a, b, c and 4 more'
    """
    every = list(names)
    more = len(every) - limit
    return ", ".join(every) if more <= 0 else f"{', '.join(every[:limit])} and {more} more"


def listed(names: Iterable[object], limit: int = 5) -> str:
    """Join the first few names in quotes, for a message.

    >>> listed("abcdefg", limit=3)
    "'a', 'b', 'c' and 4 more"
    """
    return first_few(map(repr, names), limit)


def shared_atoms(left: str, right: str) -> int:
    """Count the atoms that two qualified names have in common, from the first on.

    >>> shared_atoms("layers.0.attention.weight", "layers.0.norm.weight")
    2
    """
    count = 0
    for one, other in zip(left.split("."), right.split("."), strict=False):
        if one != other:
            break
        count += 1
    return count
