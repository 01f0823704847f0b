from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import ItemsView, Iterator
from enum import Enum

import pytest
import torch

from partita.verification.tree import children, is_leaf, parts, tensors


class Slots:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class Tagged(OrderedDict):  # type: ignore[type-arg]
    pass


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "leaf",
    [
        1,
        2.5,
        "text",
        None,
        torch.zeros(1),
        torch.nn.Linear(1, 1),
        len,
        int,
        Colour.RED,
        torch.float32,
        {1, 2},
    ],
)
def test_atoms_are_leaves(leaf: object) -> None:
    assert is_leaf(leaf)


def test_containers_are_looked_into() -> None:
    assert children(deque([1])) == [("[0]", 1)]
    assert children(Slots(3)) == [(".inner", 3)]
    assert children(torch.max(torch.zeros(1, 1), dim=0)) is not None
    assert children(()) == []


def test_attributes_beside_the_items_of_a_mapping_are_seen() -> None:
    tagged = Tagged(a=1)
    tagged.note = 2  # type: ignore[attr-defined]
    assert children(tagged) == [("['a']", 1), (".note", 2)]


class Batch(OrderedDict):  # type: ignore[type-arg]
    """Iterated over as a batch, as a TensorDict is."""

    def __iter__(self) -> Iterator[object]:
        raise TypeError("iteration over a batch without dimensions")

    def items(self) -> ItemsView[str, object]:
        return dict(zip(self.keys_in_order, self.values_in_order, strict=True)).items()

    def __init__(self, **items: object) -> None:
        super().__init__()
        self.keys_in_order, self.values_in_order = list(items), list(items.values())


def test_a_mapping_is_asked_for_its_items_alone() -> None:
    assert children(Batch(obs=1)) == [
        ("['obs']", 1),
        (".keys_in_order", ["obs"]),
        (".values_in_order", [1]),
    ]


def test_parts_are_the_children_without_their_suffixes() -> None:
    ordered, noted = OrderedDict(a=1), OrderedDict(a=1)
    vars(noted)["note"] = torch.zeros(1)
    for value in ({"a": 1, 2: "b"}, [1, "b"], (1, None), ordered, noted, deque([1]), Slots(3), {}, []):
        assert list(parts(value) or ()) == [part for _, part in children(value) or ()]
    assert len(parts(noted) or ()) == 2
    assert parts(2.5) is None
    assert parts(torch.zeros(1)) is None


def test_tensors_come_with_their_paths_in_order_and_as_often_as_they_stand_there() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    assert [path for path, _ in tensors({"a": [x, 1], "b": (y, x)}, "out")] == [
        "out['a'][0]",
        "out['b'][0]",
        "out['b'][1]",
    ]
