"""Is a call the same as an earlier one? Seen at a glance, without describing it.

The signature of a call (`partita.cudagraphs.replaying.call_signature`) reads shape, strides, dtype and
address of each input in Python, which for a model of some hundred parameters takes longer than the launches
that a replay saves. Nearly all calls are like the last one::

    the inputs' layouts     one check, in C++, of all tensors
    their addresses         of those that are used where they lie
    numbers                 by value
    modes, training flags   compared with what they were

Where anything differs, or the call is one that a glance can't tell (nested inputs, a number that lies in a
CPU tensor), it is described in full, and finds its recording, or none, that way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita._torch.tensors.storage import storage_span
from partita._torch.tensors.tensor_layouts import TensorLayouts
from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.replaying.call_signature import CallSignature, is_copied
from partita.cudagraphs.replaying.entry import RegionRecording

__all__ = ["RepeatedCall", "repeated_call"]

_NUMBERS = frozenset({bool, int, float, complex, str, type(None)})


@dataclass(frozen=True, slots=True)
class RepeatedCall:
    """A call that was replayed, the last one of its recording.

    Attributes:
        entry: that recording.
        settings: modes and flags.
        numbers: class and text of the inputs that are no tensors, by index.
        tensors: indices of the others.
        layouts: of these, and of what the graph holds.
        placed: indices of the inputs that are used where they lie.
        addresses: theirs.
        state_addresses: of what the graph holds.
        copied: indices of the inputs that are copied.
        copied_from: see `CallSignature`.
        kept_apart: spans of memory that no copied input may lie in.
    """

    entry: RegionRecording
    settings: Any
    numbers: tuple[tuple[int, type[Any], str], ...]
    tensors: tuple[int, ...]
    layouts: TensorLayouts
    placed: tuple[int, ...]
    addresses: list[int]
    state_addresses: list[int]
    copied: tuple[int, ...]
    copied_from: int | None
    kept_apart: frozenset[tuple[int, int]]

    def is_repeated_by(
        self, args: Sequence[Any], state: Sequence[torch.Tensor], settings: Any, memory: StableMemory
    ) -> bool:
        """Whether a call with these arguments can be replayed with the same recording.

        Args:
            state: what the graph holds, as it is now.
            settings: modes and flags, as they are now.
            memory: what lies there is used where it lies; the full description says so.
        """
        if len(args) != len(self.tensors) + len(self.numbers) or settings != self.settings:
            return False
        if any(type(args[at]) is not kind or repr(args[at]) != text for at, kind, text in self.numbers):
            return False
        if not self.layouts.hold_for([*(args[at] for at in self.tensors), *state]):
            return False
        if [args[at].data_ptr() for at in self.placed] != self.addresses:
            return False
        if [tensor.data_ptr() for tensor in state] != self.state_addresses:
            return False
        return not any(self._lies_elsewhere(args[at], memory) for at in self.copied)

    def _lies_elsewhere(self, value: torch.Tensor, memory: StableMemory) -> bool:
        """Whether an input that was copied may not be, or need not be."""
        start, stop = storage_span(value)
        if start in memory and not is_copied(memory.slot_of(start), self.copied_from):
            return True
        return any(first < stop and start < last for first, last in self.kept_apart)


def repeated_call(
    entry: RegionRecording,
    args: Sequence[Any],
    call: CallSignature,
    state: Sequence[torch.Tensor],
    settings: Any,
    written: Collection[int],
) -> RepeatedCall | None:
    """Return what tells whether the next call is the same as this one; None where a glance can't tell.

    Args:
        written: indices of the inputs that the graph writes.
    """
    numbers, tensors = [], []
    for at, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            tensors.append(at)
        elif type(value) in _NUMBERS:
            numbers.append((at, type(value), repr(value)))
        else:
            return None
    placed = tuple(at for at, address in enumerate(call.addresses) if address is not None)
    if len(args) != len(call.addresses) or len(placed) + len(call.copied) != len(tensors):
        return None  # a number in a CPU tensor
    copied_back = set(call.copied).intersection(written)
    if copied_back and len(call.copied) > 1:
        return None  # whether they share memory is looked up at each call
    others = set(tensors if copied_back else written).difference(call.copied)
    apart = [storage_span(value) for value in (*state, *(args[at] for at in others))] if call.copied else []
    return RepeatedCall(
        entry,
        settings,
        tuple(numbers),
        tuple(tensors),
        TensorLayouts([*(args[at] for at in tensors), *state]),
        placed,
        [address for address in call.addresses if address is not None],
        [tensor.data_ptr() for tensor in state],
        call.copied,
        call.copied_from,
        frozenset(apart),
    )
