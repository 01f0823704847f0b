"""Memory for what is received, at addresses that recordings read."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita._torch.tensors.storage_alias import StorageAlias
from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.replaying.outputs import placed

__all__ = ["InputMemory"]


_Kind = tuple[Hashable, tuple[int, ...], torch.dtype, str]
"""What an input is called, its shape, dtype and device."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor, on a storage of its own whose users can be counted."""

    memory: StorageAlias
    tensor: torch.Tensor

    @classmethod
    def like(cls, tensor: torch.Tensor) -> _Part:
        memory = StorageAlias(tensor.untyped_storage())
        part = cls(memory, placed(tensor, memory.storage, 0))
        memory.count_own_references()
        return part


class InputMemory:
    """Memory for one stage's inputs. What is received there is replayed on where it lies, without a copy.

    Microbatches that are under way together lie in slots (see `partita.cudagraphs.recording.pool`), all that
    is received for one of them in the same. A slot is used again when nobody reads any of it. Where more are
    under way than there are slots, all is received in other memory from then on, and copied as any input:
    what regions save is copied then too.

    Args:
        memory: where addresses are declared.
        slots: how many there may be, and in each how many shapes of one input.

    >>> memory = InputMemory(StableMemory(), 2)
    >>> first, second = (memory.empty(number, "x", (2,), torch.float32, "cpu") for number in range(2))
    >>> address = first.data_ptr()
    >>> del first
    >>> memory.empty(2, "x", (2,), torch.float32, "cpu").data_ptr() == address
    True
    """

    def __init__(self, memory: StableMemory, slots: int) -> None:
        self._memory = memory
        self._most = slots
        self._parts: list[dict[_Kind, _Part]] = [{} for _ in range(slots)]
        self._slots: dict[Hashable, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Nothing of what is under way."""
        parts: list[Any] = [{} for _ in range(self._most)]
        return {"_memory": self._memory, "_most": self._most, "_parts": parts, "_slots": {}}

    def empty(
        self,
        microbatch: Hashable,
        name: Hashable,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        begins: bool = True,
    ) -> torch.Tensor:
        """Return uninitialised memory for one input of a microbatch, that nobody else uses.

        Args:
            begins: whether a microbatch that lies in no slot yet begins with this input. Where it began with
                another one, which lies elsewhere, each pair of places would be a recording.
        """
        kind = name, tuple(shape), dtype, str(device)
        slot = self._slot(microbatch, kind) if begins else self._slots.get(microbatch)
        part = None if slot is None else self._parts[slot].get(kind)
        if part is not None and not part.memory.is_read:
            return part.tensor.detach()
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if slot is None or part is not None or not tensor.numel():
            return tensor
        if sum(other[0] == name for other in self._parts[slot]) == self._most:
            return tensor  # of so many kinds that recordings of the first would go
        part = self._parts[slot][kind] = _Part.like(tensor)
        self._memory.declare_storages((id(self), slot, kind), [tensor.untyped_storage()], slot)
        return part.tensor.detach()

    def _slot(self, microbatch: Hashable, kind: _Kind) -> int | None:
        """The slot in which a microbatch lies, or the first of which nobody reads anything."""
        slot = self._slots.get(microbatch)
        if slot is not None:
            part = self._parts[slot].get(kind)
            if part is None or not part.memory.is_read:
                return slot
        for free, parts in enumerate(self._parts):
            if any(part.memory.is_read for part in parts.values()):
                continue
            self._slots = {other: place for other, place in self._slots.items() if place != free}
            self._slots[microbatch] = free
            return free
        self._end()
        return None

    def _end(self) -> None:
        for slot, parts in enumerate(self._parts):
            for kind in parts:
                self._memory.declare((id(self), slot, kind), ())
        self._parts, self._slots = [], {}
