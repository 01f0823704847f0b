"""Objects that stay on their stages: what one stage changes looks right on the others, without its memory."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from partita.errors import ExecutionError
from partita.pipelining.blocks.staying_state import StayingState

CPU = torch.device("cpu")


class Layer:
    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.length = 0
        self.count = torch.tensor(0)
        self.window = (4, "left")


class Cache:
    def __init__(self, layers: int = 2) -> None:
        self.layers = [Layer() for _ in range(layers)]
        self.names: dict[str, Any] = {}


def _two() -> tuple[StayingState, StayingState]:
    cache = Cache()
    return StayingState({"cache": cache}, CPU), StayingState(
        {"cache": pickle.loads(pickle.dumps(cache))}, CPU
    )


def _sent(here: StayingState, there: StayingState) -> None:
    there.apply(pickle.loads(pickle.dumps(here.changes())))
    there.begin()


def test_a_large_tensor_is_a_ghost_elsewhere_and_takes_no_memory() -> None:
    here, there = _two()
    here.objects["cache"].layers[0].keys = torch.ones(2, 100)
    _sent(here, there)
    keys = there.objects["cache"].layers[0].keys
    assert keys.is_meta
    assert keys.shape == (2, 100)
    assert here.bytes() - there.bytes() == 2 * 100 * 4


def test_numbers_small_integer_tensors_and_tuples_are_entered_as_they_are() -> None:
    here, there = _two()
    layer = here.objects["cache"].layers[1]
    layer.length = 5
    layer.count.add_(5)
    layer.window = (8, "left")
    _sent(here, there)
    other = there.objects["cache"].layers[1]
    assert (other.length, int(other.count), other.window) == (5, 5, (8, "left"))
    assert int(there.objects["cache"].layers[0].count) == 0


def test_what_did_not_change_is_not_sent() -> None:
    here, there = _two()
    here.objects["cache"].layers[0].keys = torch.ones(2, 100)
    _sent(here, there)
    assert here.changes() == ()
    assert there.changes() == ()
    here.objects["cache"].layers[0].keys.add_(1)  # looks the same
    assert here.changes() == ()


def test_a_tensor_that_grows_is_sent_again() -> None:
    here, there = _two()
    layer = here.objects["cache"].layers[0]
    layer.keys = torch.ones(2, 3)
    _sent(here, there)
    layer.keys = torch.cat([layer.keys, torch.ones(2, 1)], 1)
    _sent(here, there)
    assert there.objects["cache"].layers[0].keys.shape == (2, 4)


def test_a_new_object_goes_along_without_its_large_tensors() -> None:
    here, there = _two()
    layer = Layer()
    layer.keys, layer.length = torch.ones(2, 100), 7
    here.objects["cache"].layers.append(layer)
    here.objects["cache"].names["new"] = {"deep": [1, torch.ones(50)]}
    _sent(here, there)
    cache = there.objects["cache"]
    assert len(cache.layers) == 3
    assert cache.layers[2].length == 7
    assert cache.layers[2].keys.is_meta
    assert cache.names["new"]["deep"][0] == 1
    assert cache.names["new"]["deep"][1].is_meta


def test_what_is_gone_is_gone_elsewhere() -> None:
    here, there = _two()
    here.objects["cache"].names["x"] = 1
    _sent(here, there)
    assert there.objects["cache"].names == {"x": 1}
    del here.objects["cache"].names["x"]
    here.objects["cache"].layers.pop()
    _sent(here, there)
    assert there.objects["cache"].names == {}
    assert len(there.objects["cache"].layers) == 1


def test_an_object_that_stands_in_itself_ends() -> None:
    cache = Cache()
    cache.names["self"] = cache
    state = StayingState({"cache": cache}, CPU)
    assert state.changes() == ()


def test_an_object_that_cannot_be_pickled_is_refused_by_its_name() -> None:
    here, _ = _two()

    class Local:
        value = 1

        def __init__(self) -> None:
            self.more = 2

    here.objects["cache"].names["it"] = Local()
    with pytest.raises(
        ExecutionError, match=r"cache\.names\.it, which the model has made .* can't be pickled"
    ):
        here.changes()


def test_it_says_which_tensors_were_there() -> None:
    here, _ = _two()
    keys = torch.ones(2, 100)
    assert not here.holds(keys)
    here.objects["cache"].layers[0].keys = keys
    here.begin()
    assert here.holds(keys)
