"""The recordings of one region: one for each kind of call, each set of addresses, and each slot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from partita._torch.containers.pytree import flatten
from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.replaying.entry import CacheInfo, RegionRecording
from partita.cudagraphs.replaying.repeated_call import RepeatedCall

__all__ = ["Counts", "RecordingCache"]


@dataclass
class Counts:
    """How often what has happened; see `CacheInfo`."""

    hits: int = 0
    recorded: int = 0
    evicted: int = 0
    reordered: int = 0
    uncaptured: int = 0
    overtaken: int = 0


@dataclass
class RecordingCache:
    """Recordings, and the kinds of calls that have been warmed up, the one unused for longest first.

    Attributes:
        max_size: how many recordings it holds in each slot.
        memory: where their results lie is declared there, so that other regions may use it where it lies.
        counts: what has happened.
        unused: how many recordings in a row were never replayed again.
        gave_up: why nothing is recorded any more, or an empty string.
    """

    max_size: int
    memory: StableMemory = field(default_factory=StableMemory)
    counts: Counts = field(default_factory=Counts)
    unused: int = 0
    gave_up: str = ""
    _entries: OrderedDict[tuple[Hashable, int], RegionRecording] = field(default_factory=OrderedDict)
    _repeated: OrderedDict[RegionRecording, RepeatedCall] = field(default_factory=OrderedDict)
    _warm: OrderedDict[Hashable, tuple[int, int]] = field(default_factory=OrderedDict)
    _renewed: OrderedDict[tuple[Hashable, int], None] = field(default_factory=OrderedDict)

    def fresh(self) -> RecordingCache:
        """Return an empty cache, for a copy of the region."""
        return RecordingCache(self.max_size)

    def find(self, key: Hashable, slot: int = 0) -> RegionRecording | None:
        """Return the recording under a key and a slot, and count it as the one used last."""
        entry = self._entries.get((key, slot))
        if entry is not None:
            self._entries.move_to_end((key, slot))
            self.unused = 0
        return entry

    def keep(self, entry: RegionRecording) -> None:
        """Keep a new recording; the one unused for longest goes where there are too many in its slot."""
        self.counts.recorded += 1
        if not entry.slot:  # in the others microbatches are recorded that are under way together
            self.unused += 1
        self._entries[entry.key, entry.slot] = entry
        results = flatten(entry.recording.result)[0]
        storages = [value.untyped_storage() for value in results if isinstance(value, torch.Tensor)]
        self.memory.declare_storages((id(self), entry.key, entry.slot), storages, entry.slot)
        alike = [place for place in self._entries if place[1] == entry.slot]
        if len(alike) > self.max_size:
            self.drop(*alike[0])

    def drop(self, key: Hashable, slot: int = 0) -> None:
        """Drop the recording under a key and a slot."""
        self._repeated.pop(self._entries.pop((key, slot)), None)
        self.memory.declare((id(self), key, slot), ())
        self.counts.evicted += 1

    def renew(self, key: Hashable, slot: int) -> bool:
        """Drop a recording, to be made anew; return False where that has been done before."""
        if (key, slot) in self._renewed:
            return False
        self._renewed[key, slot] = None
        if len(self._renewed) > 4 * self.max_size:
            self._renewed.popitem(last=False)
        self.counts.reordered += 1
        self.drop(key, slot)
        return True

    def drop_slots(self) -> None:
        """Drop the recordings of all slots but the first."""
        for key, slot in [place for place in self._entries if place[1]]:
            self.drop(key, slot)

    def note_repeated(self, call: RepeatedCall) -> None:
        """Note what tells whether a later call is the same as this one."""
        self._repeated[call.entry] = call
        self._repeated.move_to_end(call.entry)

    def repeated_calls(self) -> list[RepeatedCall]:
        """Return what earlier calls are told by, the one unused for longest first: the microbatches of a
        pipeline, each in a slot of its own, take turns.
        """
        return list(self._repeated.values())

    def is_warm(self, kind: Hashable) -> bool:
        """Return whether a call of that kind has been run as it is."""
        return kind in self._warm

    def returned_bytes(self, kind: Hashable, *, saved: bool) -> int:
        """Return how many bytes a call of that kind returns, as far as known; with or without those saved."""
        kept, saved_bytes = self._warm.get(kind, (0, 0))
        return kept + saved_bytes if saved else kept

    def note_warm(self, kind: Hashable, kept: int = 0, saved: int = 0) -> None:
        """Note that a call of that kind has been run as it is, and how many bytes it has returned: for good,
        and for backward.
        """
        self._warm[kind] = kept, saved
        if len(self._warm) > 4 * self.max_size:
            self._warm.popitem(last=False)

    def clear(self) -> None:
        """Drop all recordings; the counts stay."""
        for key, slot in self._entries:
            self.memory.declare((id(self), key, slot), ())
        self._entries.clear()
        self._repeated.clear()
        self._renewed.clear()
        self._warm.clear()
        self.gave_up, self.unused = "", 0

    def info(self) -> CacheInfo:
        """Return what has been recorded, for the user."""
        return CacheInfo(len(self._entries), self.max_size, **vars(self.counts), gave_up=self.gave_up)
