"""The recordings of one region: one for each kind of call and each set of addresses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from partita._torch.containers.pytree import flatten
from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.replaying.entry import CacheInfo, RegionRecording

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
        max_size: how many recordings it holds.
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
    _entries: OrderedDict[Hashable, RegionRecording] = field(default_factory=OrderedDict)
    _warm: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)

    def fresh(self) -> RecordingCache:
        """Return an empty cache, for a copy of the region."""
        return RecordingCache(self.max_size)

    def find(self, key: Hashable) -> RegionRecording | None:
        """Return the recording under a key, and count it as the one used last."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            self.unused = 0
        return entry

    def keep(self, key: Hashable, entry: RegionRecording) -> None:
        """Keep a new recording; the one unused for longest goes where there are too many."""
        self.counts.recorded += 1
        self.unused += 1
        self._entries[key] = entry
        results = flatten(entry.recording.result)[0]
        tensors = [value for value in results if isinstance(value, torch.Tensor)]
        self.memory.declare_storages((id(self), key), (tensor.untyped_storage() for tensor in tensors))
        if len(self._entries) > self.max_size:
            self.drop(next(iter(self._entries)))

    def drop(self, key: Hashable) -> None:
        """Drop the recording under a key."""
        del self._entries[key]
        self.memory.declare((id(self), key), ())
        self.counts.evicted += 1

    def is_warm(self, kind: Hashable) -> bool:
        """Return whether a call of that kind has been run as it is."""
        return kind in self._warm

    def note_warm(self, kind: Hashable) -> None:
        """Note that a call of that kind has been run as it is."""
        self._warm[kind] = None
        if len(self._warm) > 4 * self.max_size:
            self._warm.popitem(last=False)

    def clear(self) -> None:
        """Drop all recordings; the counts stay."""
        for key in self._entries:
            self.memory.declare((id(self), key), ())
        self._entries.clear()
        self._warm.clear()
        self.gave_up, self.unused = "", 0

    def info(self) -> CacheInfo:
        """Return what has been recorded, for the user."""
        return CacheInfo(len(self._entries), self.max_size, **vars(self.counts), gave_up=self.gave_up)
