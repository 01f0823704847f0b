"""What a region remembers of its recordings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.replaying.recording_cache import RecordingCache


class _Entry:
    def __init__(self, key: str, result: torch.Tensor, slot: int = 0) -> None:
        self.key, self.slot, self.recording = key, slot, SimpleNamespace(result=[result])


def _entry(key: str, result: torch.Tensor, slot: int = 0) -> Any:
    return _Entry(key, result, slot)


def test_the_recording_unused_for_longest_goes_first() -> None:
    cache = RecordingCache(2)
    first, second, third = (_entry(key, torch.zeros(2)) for key in "abc")
    cache.keep(first)
    cache.keep(second)
    assert cache.find("a") is first
    cache.keep(third)
    assert (cache.find("b"), cache.find("a"), cache.find("c")) == (None, first, third)
    assert (cache.info().size, cache.info().recorded, cache.info().evicted) == (2, 3, 1)


def test_recordings_in_a_row_that_are_not_used_again_are_counted() -> None:
    cache = RecordingCache(8)
    for key in "abc":
        cache.keep(_entry(key, torch.zeros(1)))
    assert cache.unused == 3
    assert cache.find("d") is None
    assert cache.unused == 3
    cache.find("b")
    assert cache.unused == 0


def test_results_lie_in_the_memory_of_the_model_as_long_as_they_are_kept() -> None:
    memory, result = StableMemory(), torch.zeros(4)
    cache = RecordingCache(1, memory)
    address = result.untyped_storage().data_ptr()
    cache.keep(_entry("a", result))
    assert memory.storage_at(address) is not None
    cache.keep(_entry("b", torch.zeros(4)))
    assert memory.storage_at(address) is None


def test_each_slot_has_a_recording_of_its_own_and_the_others_can_go() -> None:
    memory, handed_on, results = StableMemory(), torch.zeros(4), [torch.zeros(4) for _ in range(3)]
    memory.declare_storages("parameters", [handed_on.untyped_storage()])
    cache = RecordingCache(4, memory)
    entries = [_entry("a", result, slot) for slot, result in enumerate(results)]
    entries[2].recording.result.append(handed_on)
    for entry in entries:
        cache.keep(entry)
    assert [cache.find("a", slot) for slot in range(4)] == [*entries, None]
    assert [memory.slot_of(result.data_ptr()) for result in (*results, handed_on)] == [0, 1, 2, None]
    cache.drop_slots()
    assert [cache.find("a", slot) for slot in range(3)] == [entries[0], None, None]
    assert memory.slot_of(results[1].data_ptr()) is None


def test_a_copy_of_a_region_begins_anew_and_a_cleared_one_keeps_its_counts() -> None:
    cache = RecordingCache(3)
    cache.keep(_entry("a", torch.zeros(1)))
    cache.note_warm("kind")
    cache.counts.hits = 5
    fresh = cache.fresh()
    assert (fresh.max_size, fresh.info().size, fresh.counts.hits, fresh.is_warm("kind")) == (3, 0, 0, False)
    cache.clear()
    assert (cache.info().size, cache.counts.hits, cache.is_warm("kind"), cache.unused) == (0, 5, False, 0)


def test_only_so_many_kinds_of_calls_are_remembered_to_be_warm() -> None:
    cache = RecordingCache(1)
    for kind in range(5):
        cache.note_warm(kind)
    assert [cache.is_warm(kind) for kind in range(5)] == [False, True, True, True, True]
