"""What a region remembers of its recordings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.replaying.recording_cache import RecordingCache


def _entry(result: torch.Tensor) -> Any:
    return SimpleNamespace(recording=SimpleNamespace(result=[result]))


def test_the_recording_unused_for_longest_goes_first() -> None:
    cache = RecordingCache(2)
    first, second, third = (_entry(torch.zeros(2)) for _ in range(3))
    cache.keep("a", first)
    cache.keep("b", second)
    assert cache.find("a") is first
    cache.keep("c", third)
    assert (cache.find("b"), cache.find("a"), cache.find("c")) == (None, first, third)
    assert (cache.info().size, cache.info().recorded, cache.info().evicted) == (2, 3, 1)


def test_recordings_in_a_row_that_are_not_used_again_are_counted() -> None:
    cache = RecordingCache(8)
    for key in "abc":
        cache.keep(key, _entry(torch.zeros(1)))
    assert cache.unused == 3
    assert cache.find("d") is None
    assert cache.unused == 3
    cache.find("b")
    assert cache.unused == 0


def test_results_lie_in_the_memory_of_the_model_as_long_as_they_are_kept() -> None:
    memory, result = StableMemory(), torch.zeros(4)
    cache = RecordingCache(1, memory)
    address = result.untyped_storage().data_ptr()
    cache.keep("a", _entry(result))
    assert memory.storage_at(address) is not None
    cache.keep("b", _entry(torch.zeros(4)))
    assert memory.storage_at(address) is None


def test_a_copy_of_a_region_begins_anew_and_a_cleared_one_keeps_its_counts() -> None:
    cache = RecordingCache(3)
    cache.keep("a", _entry(torch.zeros(1)))
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
