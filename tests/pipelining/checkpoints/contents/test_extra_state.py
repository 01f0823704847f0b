"""Modules' extra state, as it comes back."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.pipelining.running import assert_equal
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints.contents.extra_state import (
    as_read,
    as_stored,
    stored_parts,
    value_of_parts,
)


class _Extra(nn.Module):
    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


_STATES = (
    {},
    {"a": {}},
    {"a": [], "b": {"c": {}}},
    [{}, torch.ones(1)],
    {0: torch.ones(1), 1: {(2, 3): None}},
    {"a.b": 1, "a": {"b": 2}},
    {"": 1},
    OrderedDict(a=1),
    (torch.ones(1), {"a": (1,)}),
    as_stored({0: 1}),
    {"a": as_stored({0: 1})},
    [torch.full((1,), float(index)) for index in range(12)],
)


@pytest.mark.parametrize("state", _STATES, ids=str)
def test_extra_state_comes_back_as_it_was(tmp_path: Path, state: Any) -> None:
    """Torch's layout has no empty dicts and makes text of all keys, without a word."""
    model = nn.Sequential(_Extra(state), _Extra([state]))
    save_checkpoint(tmp_path, model)
    other = nn.Sequential(_Extra("before"), _Extra("before"))
    load_checkpoint(tmp_path, other)
    assert_equal([module.state for module in other], [state, [state]])
    assert type(other[0].state) is type(state)


def test_an_array_is_extra_state_too(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _Extra(numpy.arange(3)), allow_pickle=True)
    other = _Extra(numpy.zeros(2))
    load_checkpoint(tmp_path, other, allow_pickle=True)
    assert other.state.tolist() == [0, 1, 2]


def test_modules_that_return_one_tensor_get_a_value_each(tmp_path: Path) -> None:
    """They were taken for a tie, whose second name nobody loaded."""
    save_checkpoint(tmp_path, nn.Sequential(_Extra(torch.ones(2)), _Extra(torch.zeros(3))))
    nothing = torch.empty(0)
    other = nn.Sequential(_Extra(nothing), _Extra(nothing))
    load_checkpoint(tmp_path, other)
    assert_equal([module.state for module in other], [torch.ones(2), torch.zeros(3)])


@pytest.mark.parametrize("inside", [False, True])
def test_wrapped_tensors_are_no_plain_data(tmp_path: Path, inside: bool) -> None:
    state = TwoTensor(torch.ones(2), torch.zeros(2))
    with pytest.raises(
        CheckpointError, match=r"_extra_state' is a (dict|TwoTensor), which can't be saved as"
    ):
        save_checkpoint(tmp_path, _Extra({"a": state} if inside else state))
    save_checkpoint(tmp_path, _Extra({"a": state} if inside else state), allow_pickle=True)
    other = _Extra()
    load_checkpoint(tmp_path, other, allow_pickle=True)
    loaded = other.state["a"] if inside else other.state
    assert_equal([loaded.a, loaded.b], [torch.ones(2), torch.zeros(2)])


def test_values_that_are_stored_as_they_are() -> None:
    for value in (None, 3, (1, 2), [1, [2]], {"a": [{"b": ()}]}):
        assert as_stored(value) is value
        assert as_read(value) is value


def test_parts_of_names_that_begin_alike() -> None:
    ways: dict[str, tuple[str | int, ...]] = {"a.b.c": ("a.b", "c"), "a.bc": ("a", "bc")}
    parts = stored_parts({"a", "a.b", "x"}, [*ways, "old.without.way"], ways)
    assert parts == {"a": {"a.bc": ("bc",)}, "a.b": {"a.b.c": ("c",)}, "x": {}}


def test_parts_are_put_together_in_any_order() -> None:
    parts: dict[tuple[str | int, ...], Any] = {("a", index): index for index in range(12)}
    mixed = random.Random(0).sample(list(parts.items()), len(parts))
    assert value_of_parts(dict(mixed)) == {"a": list(range(12))}
