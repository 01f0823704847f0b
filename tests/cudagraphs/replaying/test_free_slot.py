from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from partita.cudagraphs.recording.pool import MemoryPools
from partita.cudagraphs.replaying.free_slot import free_slot, is_free
from partita.cudagraphs.replaying.recording_cache import RecordingCache


class Entry:
    """A recording whose results are in use, or not."""

    def __init__(self, pools: MemoryPools, slot: int) -> None:
        self.key, self.slot, self.number = "a", slot, pools[slot].next_number()
        self.recording = SimpleNamespace(result=[torch.zeros(1)])
        self.in_place = SimpleNamespace(in_use=False)
        self.gave_up = 0

    @property
    def is_read(self) -> bool:
        return self.in_place.in_use

    def give_up(self) -> None:
        self.gave_up += 1


def world(slots: int = 2) -> tuple[RecordingCache, MemoryPools, list[Any]]:
    cache, pools = RecordingCache(slots), MemoryPools()
    entries: list[Any] = [Entry(pools, slot) for slot in range(slots)]
    for entry in entries:
        cache.keep(entry)
    return cache, pools, entries


def test_the_first_slot_that_is_not_in_use_is_taken() -> None:
    cache, pools, (first, second) = world()
    assert free_slot(cache, pools, "a", 0) == 0
    assert free_slot(cache, pools, "b", 0) == 0
    assert free_slot(cache, pools, "b", 1) == 1
    first.in_place.in_use = True
    assert (is_free(first, pools), is_free(second, pools)) == (False, True)
    assert free_slot(cache, pools, "a", 0) == 1
    cache.drop("a", 1)
    assert free_slot(cache, pools, "a", 0) == 1, "one that has no recording"


def test_where_all_are_in_use_the_first_is_copied_from_now_on() -> None:
    cache, pools, entries = world()
    for entry in entries:
        entry.in_place.in_use = True
    assert free_slot(cache, pools, "a", 0) is None
    assert [entry.gave_up for entry in entries] == [1, 0]


def test_what_would_overwrite_a_newer_result_is_recorded_anew_once() -> None:
    cache, pools, (first, _) = world()
    newer: Any = Entry(pools, 0)
    newer.in_place.in_use = True
    pools[0].hand_out(newer.number, newer)
    assert not is_free(first, pools)
    assert free_slot(cache, pools, "a", 0) == 1, "a recording that is there goes first"
    cache.drop("a", 1)
    assert free_slot(cache, pools, "a", 0) == 0
    assert cache.find("a", 0) is None
    cache.keep(first)  # too old again
    assert free_slot(cache, pools, "a", 0) == 1
    assert cache.counts.reordered == 1
