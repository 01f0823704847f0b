"""One recording of a region, and the count of what a region has recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita._torch.tensors.copy_many import copy_many
from partita.cudagraphs.recording.pool import MemoryPools
from partita.cudagraphs.recording.recorder import Recording
from partita.cudagraphs.replaying.outputs import OutputPlan

__all__ = ["CacheInfo", "RegionRecording", "fill_all"]


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What a region has recorded.

    Attributes:
        size: recordings that it holds, one for each kind of call, each set of addresses, and each slot.
        max_size: how many it may hold in a slot; the one that was not used for longest goes first.
        hits: calls that were replayed with a recording that was there.
        recorded: how often it has recorded.
        evicted: how many recordings have gone.
        reordered: those of them that went because they would have overwritten what a newer one
            had saved for backward.
        uncaptured: calls that ran as they are, warm-ups included.
        overtaken: those of them that came while somebody still had what an earlier one had
            saved for backward.
        gave_up: why it records no more, or an empty string.
    """

    size: int
    max_size: int
    hits: int
    recorded: int
    evicted: int
    reordered: int
    uncaptured: int
    overtaken: int
    gave_up: str


@dataclass(frozen=True, eq=False)
class RegionRecording:
    """One recording with all that a replay needs. To the memory pool it is what was handed out.

    Attributes:
        key: what it is found by, in its slot.
        slot: where it was recorded, see `partita.cudagraphs.recording.pool`.
        number: of the recording in the pool of that slot.
        buffers: the inputs that are copied, by index, and where to.
        written: those of them that the graph writes.
        in_place: how outputs are made where those that are saved for backward are not copied.
        copying: how they are made where none is.
        nested: nests them as the graph does.
        give_up: what the pool calls where they are in the way for too long.
    """

    key: Hashable
    slot: int
    number: int
    recording: Recording
    buffers: tuple[tuple[int, torch.Tensor], ...]
    written: tuple[tuple[int, torch.Tensor], ...]
    in_place: OutputPlan
    copying: OutputPlan
    nested: Callable[[list[Any]], Any]
    give_up: Callable[[], None]

    @property
    def is_read(self) -> bool:
        """Whether somebody still has an output that is not a copy."""
        return self.in_place.is_read or self.copying.is_read

    def replay(self, values: Sequence[Any], pools: MemoryPools, *, copies: bool) -> Any:
        """Copy the inputs in, replay, copy what was written back, and hand out the outputs."""
        fill_all([buffer for _, buffer in self.buffers], [values[number] for number, _ in self.buffers])
        self.recording.replay()
        copy_many([values[number] for number, _ in self.written], [buffer for _, buffer in self.written])
        plan = self.copying if copies else self.in_place
        results = plan.take(values)
        if plan.hands_out_memory:
            pools[self.slot].hand_out(self.number, self)
        self.recording.finish()
        return self.nested(results)


def fill_all(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy values to buffers of the same strides, also where elements share memory (an expanded tensor)."""
    pairs = [_apart(*pair) for pair in zip(buffers, values, strict=True)]
    copy_many([buffer for buffer, _ in pairs], [value for _, value in pairs])


def _apart(buffer: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of both whose elements share no memory."""
    if 0 not in buffer.stride() or buffer.numel() < 2:
        return buffer, value
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in buffer.stride())
    return buffer[index], value[index]
