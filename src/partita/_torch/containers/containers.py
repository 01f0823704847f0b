"""The content of Python's containers, read and written past whatever a subclass overrides.

A frozen configuration is a ``dict`` whose ``update`` and ``__setitem__`` raise::

    value = Frozen(width=4)      content_of(value) -> ["width", 4]      fill(value, ["width", 4])
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["content_of", "fill", "kind_of"]


def kind_of(value: Any) -> type | None:
    """The container that ``value`` is, or is a subclass of; None for anything else.

    >>> kind_of({}), kind_of(5)
    (<class 'dict'>, None)
    """
    return next((kind for kind in _WAYS if isinstance(value, kind)), None)


def content_of(value: Any) -> list[Any]:
    """Return what a container holds as a flat list: of a dict, keys and values in turn.

    >>> content_of({"a": 1, "b": 2})
    ['a', 1, 'b', 2]
    """
    kind = kind_of(value)
    assert kind is not None, f"a {type(value).__name__} is no container"
    return _WAYS[kind][0](value)


def fill(value: Any, content: list[Any]) -> None:
    """Replace what a container holds by ``content``, which is as `content_of` returns it."""
    kind = kind_of(value)
    assert kind is not None, f"a {type(value).__name__} is no container"
    _WAYS[kind][1](value, content)


def _pairs(items: list[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(items[::2], items[1::2], strict=True)


def _items(mapping: dict[Any, Any]) -> list[Any]:
    return [part for item in dict.items(mapping) for part in item]


def _fill_dict(mapping: dict[Any, Any], items: list[Any]) -> None:
    dict.clear(mapping)
    dict.update(mapping, _pairs(items))


def _ordered_items(mapping: OrderedDict[Any, Any]) -> list[Any]:
    return [part for key in OrderedDict.__iter__(mapping) for part in (key, dict.__getitem__(mapping, key))]


def _fill_ordered(mapping: OrderedDict[Any, Any], items: list[Any]) -> None:
    # an OrderedDict keeps the order beside the items, where dict's methods don't reach
    OrderedDict.clear(mapping)
    for key, value in _pairs(items):
        OrderedDict.__setitem__(mapping, key, value)


def _fill_list(values: list[Any], content: list[Any]) -> None:
    list.__setitem__(values, slice(None), content)


def _fill_deque(values: deque[Any], content: list[Any]) -> None:
    deque.clear(values)
    deque.extend(values, content)


def _fill_set(values: set[Any], content: list[Any]) -> None:
    set.clear(values)
    set.update(values, content)


# A subclass stands before its base.
_WAYS: dict[type, tuple[Callable[[Any], list[Any]], Callable[[Any, list[Any]], None]]] = {
    OrderedDict: (_ordered_items, _fill_ordered),
    dict: (_items, _fill_dict),
    list: (lambda values: list(list.__iter__(values)), _fill_list),
    deque: (lambda values: list(deque.__iter__(values)), _fill_deque),
    set: (lambda values: list(set.__iter__(values)), _fill_set),
}
