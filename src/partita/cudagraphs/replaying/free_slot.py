"""In which slot a call is replayed or recorded (see `partita.cudagraphs.recording.pool`)."""

from __future__ import annotations

from collections.abc import Hashable

from partita.cudagraphs.recording.pool import Borrowed, MemoryPools
from partita.cudagraphs.replaying.entry import RegionRecording
from partita.cudagraphs.replaying.recording_cache import RecordingCache

__all__ = ["free_slot", "is_free"]


def is_free(entry: RegionRecording, pools: MemoryPools) -> bool:
    """Whether a replay overwrites nothing that somebody still has."""
    return not entry.in_place.in_use and pools[entry.slot].endangered_by(entry.number) is None


def free_slot(cache: RecordingCache, pools: MemoryPools, key: Hashable, first: int) -> int | None:
    """Return the first slot, from ``first`` on, whose recording of a call can be replayed, or that has none.

    A recording that would overwrite what a newer one has returned is dropped once, to be the newer one.

    Returns:
        None where all are in use: then what is in the way is copied from now on.
    """
    in_the_way: Borrowed | None = None
    too_old: int | None = None
    empty: int | None = None
    for slot in range(first, first + cache.max_size):
        entry = cache.find(key, slot)
        if entry is None:
            empty = slot
            break
        if entry.in_place.in_use:
            in_the_way = in_the_way or entry
            continue
        endangered = pools[slot].endangered_by(entry.number)
        if endangered is None:
            return slot
        too_old = slot if too_old is None else too_old
        in_the_way = in_the_way or endangered
    if too_old is not None and cache.renew(key, too_old):
        return too_old
    if empty is None and in_the_way is not None:
        in_the_way.give_up()
    return empty
