from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from partita._torch.containers.objects import Opened, open_objects


class Mode(Enum):
    FAST = 1


class Layer:
    __slots__ = ("keys", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values


@dataclass
class Cache:
    layers: list[Layer]
    length: int
    mode: Mode = Mode.FAST
    kind: type = torch.nn.Linear
    notes: dict[str, Any] = field(default_factory=dict)


def _cache(length: int = 3) -> Cache:
    return Cache([Layer(torch.zeros(2), torch.ones(2)), Layer(torch.zeros(1), torch.ones(1))], length)


def test_the_tensors_of_an_object_are_leaves_in_order() -> None:
    cache = _cache()
    leaves, _ = pytree.tree_flatten(open_objects((1, cache)))
    expected = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert leaves[0] == 1
    assert all(leaf is tensor for leaf, tensor in zip(leaves[1:], expected, strict=True))


def test_unflattening_gives_an_object_of_the_same_class_with_the_new_tensors() -> None:
    leaves, spec = pytree.tree_flatten(open_objects(_cache()))
    again = pytree.tree_unflatten([leaf + 5 for leaf in leaves], spec)
    assert type(again) is Cache
    assert torch.equal(again.layers[1].values, torch.full((1,), 6.0))
    assert (again.length, again.mode, again.kind) == (3, Mode.FAST, torch.nn.Linear)


def test_the_object_itself_is_not_touched() -> None:
    cache = _cache()
    layer = cache.layers[0]
    leaves, spec = pytree.tree_flatten(open_objects(cache))
    pytree.tree_unflatten([leaf + 5 for leaf in leaves], spec)
    assert cache.layers[0] is layer
    assert torch.equal(layer.keys, torch.zeros(2))


def test_structures_are_equal_where_all_but_the_tensors_is() -> None:
    _, spec = pytree.tree_flatten(open_objects(_cache()))
    _, same = pytree.tree_flatten(open_objects(_cache()))
    _, longer = pytree.tree_flatten(open_objects(_cache(length=4)))
    assert spec == same
    assert spec != longer


def test_devices_are_compared_as_values() -> None:
    """A key-value cache notes a device in each layer, of which torch 2.11 makes another object each time."""
    device = torch.device("cpu", 0)
    caches = _cache(), _cache()
    caches[0].notes = {"first": device, "second": device}
    caches[1].notes = {"first": torch.device("cpu", 0), "second": torch.device("cpu", 0)}
    one, other = (pytree.tree_flatten(open_objects(cache))[1] for cache in caches)
    assert one == other


def test_a_tensor_that_stands_in_two_places_is_one_leaf() -> None:
    shared = torch.zeros(1)
    leaves, spec = pytree.tree_flatten(open_objects(Layer(shared, shared)))
    assert len(leaves) == 1
    again = pytree.tree_unflatten(leaves, spec)
    assert again.keys is again.values


def test_an_object_that_holds_itself_is_opened() -> None:
    cache = _cache()
    cache.notes["self"] = cache
    leaves, spec = pytree.tree_flatten(open_objects(cache))
    again = pytree.tree_unflatten(leaves, spec)
    assert again.notes["self"] is again


def test_a_class_defined_in_a_function_is_opened_too() -> None:
    class Local:
        def __init__(self) -> None:
            self.x = torch.ones(2)

    leaves, spec = pytree.tree_flatten(open_objects([Local()]))
    assert isinstance(pytree.tree_unflatten(leaves, spec)[0], Local)


@pytest.mark.parametrize("value", [None, 3, "text", Mode.FAST, torch.float32, torch.nn.Linear, len, (1, [2])])
def test_what_is_no_object_of_tensors_stays_itself(value: object) -> None:
    assert open_objects(value) is value


def test_an_object_that_can_not_be_taken_apart_stays_itself() -> None:
    class Stubborn:
        def __reduce__(self) -> str:
            raise TypeError("no")

    stubborn = Stubborn()
    assert open_objects([stubborn])[0] is stubborn


def test_a_structure_can_be_copied_and_pickled() -> None:
    leaves, spec = pytree.tree_flatten(open_objects(_cache()))
    assert copy.deepcopy(spec) == spec
    again = pytree.tree_unflatten(leaves, pickle.loads(pickle.dumps(spec)))
    assert again.length == 3


def test_no_class_of_the_user_is_registered() -> None:
    open_objects(_cache())
    assert pytree.tree_leaves(_cache())[0].length == 3
    assert isinstance(open_objects(_cache()), Opened)


class Frozen(dict[str, Any]):
    """Takes nothing but what it was made of."""

    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(items)
        self.name = name

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("this is frozen")


class FrozenRows(list[Any]):
    def append(self, value: Any) -> None:
        raise TypeError("this is frozen")

    extend = append


class FrozenOrder(OrderedDict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("this is frozen")


@pytest.mark.parametrize("kind", ["dict", "list", "ordered"])
def test_a_container_that_refuses_to_be_filled_is_put_together_again(kind: str) -> None:
    value: Any = (
        Frozen("config", x=torch.zeros(2), width=4) if kind == "dict" else FrozenRows([torch.zeros(2)])
    )
    if kind == "ordered":
        value = FrozenOrder()
        OrderedDict.__setitem__(value, "x", torch.zeros(2))
    leaves, spec = pytree.tree_flatten(open_objects([value]))
    (again,) = pytree.tree_unflatten([torch.ones(2)], spec)
    assert len(leaves) == 1
    assert type(again) is type(value)
    assert torch.equal(again[0 if kind == "list" else "x"], torch.ones(2))
    if kind == "dict":
        assert (again.name, again["width"]) == ("config", 4)
