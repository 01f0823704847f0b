"""Modules' extra state in a checkpoint: any plain value, of which torch stores dicts item by item.

A dict is stored so where it comes back as it was, and then torch's own functions read it too. What torch's
layout would lose (keys that are no text, an empty dict, a dict's class) is stored whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from partita.pipelining.checkpoints.contents.wrapped_tensors import is_wrapper

__all__ = ["as_read", "as_stored", "stored_parts", "value_of_parts"]

Way = tuple[str | int, ...]
"""The way into a value: text leads into a dict, a number into a list."""

_MARK = "partita.whole"
"""The first of two items of a tuple, which torch stores whole, whose second is the value."""


def as_stored(value: Any) -> Any:
    """What to write for a value, so that `as_read` or `value_of_parts` gives it back.

    >>> as_stored({"scale": 2}), as_stored({0: 2})
    ({'scale': 2}, ('partita.whole', {0: 2}))
    """
    return value if _comes_back(value) else (_MARK, value)


def _comes_back(value: Any) -> bool:
    """Whether a value is the same after torch has stored it, dicts item by item."""
    if isinstance(value, Mapping):
        keys_come_back = all(type(key) is str and "." not in key for key in value)
        return (
            bool(value) and type(value) is dict and keys_come_back and all(map(_comes_back, value.values()))
        )
    if isinstance(value, list):
        return all(map(_comes_back, value))
    return not is_wrapper(value) and as_read(value) is value


def as_read(stored: Any) -> Any:
    """The value that `as_stored` was called with, of what it returned."""
    is_whole = type(stored) is tuple and len(stored) == 2 and type(stored[0]) is str and stored[0] == _MARK
    return stored[1] if is_whole else stored


def stored_parts(
    names: Collection[str], there: Collection[str], ways: Mapping[str, Way]
) -> dict[str, dict[str, Way]]:
    """What is stored of values of a state dict, each with its way into the value; none into a whole one.

    Args:
        names: of the values.
        there: all names in the checkpoint.
        ways: from those in turn to their ways into the state dict; what an older torch wrote may have none.

    >>> stored_parts(["a", "b"], ["a.c.0", "b"], {"a.c.0": ("a", "c", 0)})
    {'a': {'a.c.0': ('c', 0)}, 'b': {'b': ()}}
    """
    parts: dict[str, dict[str, Way]] = {name: {name: ()} if name in there else {} for name in names}
    for place in there:
        way = ways.get(place, ())
        name = ""
        for depth, key in enumerate(way[:-1]):
            name = f"{name}.{key}" if depth else str(key)
            if name in parts and name not in there:
                parts[name][place] = way[depth + 1 :]
    return parts


def value_of_parts(parts: Mapping[Way, Any]) -> Any:
    """A value, put together of its parts.

    >>> value_of_parts({("a", 0, "b"): 1, ("a", 1): 2, ("c",): 3})
    {'a': [{'b': 1}, 2], 'c': 3}
    """
    if () in parts:
        return as_read(parts[()])
    inside: dict[str | int, dict[Way, Any]] = {}
    for (first, *rest), value in parts.items():
        inside.setdefault(first, {})[tuple(rest)] = value
    items = {key: value_of_parts(below) for key, below in inside.items()}
    is_list = all(isinstance(key, int) for key in items)
    return [items[key] for key in sorted(items, key=int)] if is_list else items
