from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.replaying.input_memory import InputMemory


def take(memory: InputMemory, microbatch: int, name: str = "x", rows: int = 2, **begins: bool) -> Tensor:
    return memory.empty(microbatch, name, (rows, 3), torch.float32, "cpu", **begins)


@pytest.fixture
def stable() -> StableMemory:
    return StableMemory()


def slot_of(stable: StableMemory, value: Tensor) -> int | None:
    address = value.untyped_storage().data_ptr()
    return stable.slot_of(address) if address in stable else None


def test_all_of_a_microbatch_lies_in_one_slot(stable: StableMemory) -> None:
    memory = InputMemory(stable, 3)
    values = [take(memory, number, name) for number in (5, 6) for name in "xy"]
    assert [slot_of(stable, value) for value in values] == [0, 0, 1, 1]
    assert slot_of(stable, take(memory, 5, "gradient", begins=False)) == 0
    assert slot_of(stable, take(memory, 7, "gradient", begins=False)) is None, "it began elsewhere"


def test_memory_is_used_again_when_nobody_reads_it(stable: StableMemory) -> None:
    memory = InputMemory(stable, 3)
    first, second = take(memory, 0), take(memory, 1)
    address, part = first.data_ptr(), first[1:]
    del first
    assert slot_of(stable, take(memory, 2)) == 2, "a view is still read"
    del part
    assert take(memory, 3).data_ptr() == address
    assert second.data_ptr() != address


def test_what_is_read_longer_than_expected_is_not_overwritten(stable: StableMemory) -> None:
    memory = InputMemory(stable, 2)
    kept = take(memory, 0).fill_(1)
    again = take(memory, 0)
    assert slot_of(stable, again) == 1, "it lies where nobody reads"
    another = take(memory, 0, begins=False)
    assert slot_of(stable, another) is None, "and what does not begin there, anywhere"
    for value in (again, another):
        value.fill_(2)
    assert kept.eq(1).all()


def test_sizes_that_take_turns_keep_their_memory(stable: StableMemory) -> None:
    """Each change allocated anew, and was recorded anew."""
    memory = InputMemory(stable, 2)
    addresses = [[take(memory, 0, rows=rows).data_ptr() for rows in (2, 4)] for _ in range(3)]
    assert addresses[0] == addresses[1] == addresses[2]
    assert slot_of(stable, take(memory, 0, rows=4)) == 0
    assert slot_of(stable, take(memory, 0, rows=5)) is None, "there are as many recordings as slots"
    assert take(memory, 1, rows=0).shape == (0, 3)


def test_more_microbatches_than_slots_lie_elsewhere_from_then_on(stable: StableMemory) -> None:
    memory = InputMemory(stable, 2)
    values = [take(memory, number) for number in range(3)]
    assert slot_of(stable, values[2]) is None
    assert slot_of(stable, values[0]) is None, "what lies there is copied from now on"
    values.clear()
    assert slot_of(stable, take(memory, 0)) is None


def test_a_copy_and_a_pickle_begin_anew() -> None:
    memory = InputMemory(StableMemory(), 2)
    value = take(memory, 0)
    for twin in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert take(twin, 0).data_ptr() != value.data_ptr()
