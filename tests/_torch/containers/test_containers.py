from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any

import pytest

from partita._torch.containers.containers import content_of, fill, kind_of


def _refuse(*_: Any, **__: Any) -> Any:
    raise TypeError("frozen")


REFUSED = ("update", "clear", "extend", "append", "add", "__setitem__", "__iter__", "items", "__len__")


@pytest.mark.parametrize(
    ("kind", "content", "other"),
    [
        (dict, ["a", 1, "b", 2], ["b", 3]),
        (OrderedDict, ["a", 1, "b", 2], ["b", 2, "a", 1]),
        (list, [1, 2], [3]),
        (deque, [1, 2], [3, 4, 5]),
        (set, [1, 2], [3]),
    ],
)
def test_a_container_is_read_and_filled_past_a_class_that_refuses_everything(
    kind: type, content: list[Any], other: list[Any]
) -> None:
    value = type("Frozen", (kind,), dict.fromkeys(REFUSED, _refuse))()
    assert kind_of(value) is kind
    for wanted in (content, other):
        fill(value, wanted)
        assert content_of(value) == wanted


def test_what_a_subclass_keeps_beside_stays() -> None:
    counts = defaultdict(int, a=1)
    fill(counts, ["b", 2])
    assert counts == {"b": 2}
    assert counts.default_factory is int


def test_an_ordered_dict_has_its_order_in_both_directions() -> None:
    value = OrderedDict(a=1, b=2)
    fill(value, ["b", 2, "a", 1])
    assert list(reversed(value)) == ["a", "b"]


@pytest.mark.parametrize("value", [(1,), "text", frozenset(), None, 3])
def test_what_can_not_be_changed_is_no_container_here(value: object) -> None:
    assert kind_of(value) is None
