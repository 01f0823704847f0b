"""Which memory keeps its address from run to run, so that a recording may use it where it lies.

A parameter lies where it lies until somebody moves it; what a recording returns lies where the recording put
it. Everything else (what a user passes in, what runs between regions) may lie elsewhere at each run, and is
copied to a buffer. A wrong entry costs a recording and nothing else: a replay on an address is only used for
an input that lies on that address now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

import torch

__all__ = ["StableMemory"]


class StableMemory:
    """Addresses of storages that stay, as their owners declare them. One is shared by all regions of a model,
    backward included, which so finds the parameters that it is handed where forward has seen them.
    """

    def __init__(self) -> None:
        self._declared: dict[Hashable, tuple[int, ...]] = {}
        self._counts: Counter[int] = Counter()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._slots: dict[int, int] = {}

    def __reduce__(self) -> tuple[type[StableMemory], tuple[()]]:
        """A copy, and what was pickled, has other memory: nothing is declared there yet."""
        return type(self), ()

    def declare_storages(
        self, owner: Hashable, storages: Iterable[torch.UntypedStorage], slot: int | None = None
    ) -> None:
        """Declare the addresses of ``storages``, and keep them alive until ``owner`` declares others.

        Args:
            slot: of the recording that returns them, or reads what is received there (see
                `partita.cudagraphs.recording.pool`); None: they stay whatever the slot.
        """
        by_address = {storage.data_ptr(): storage for storage in storages}
        fresh = [address for address in by_address if address not in self]  # the others are handed on
        self.declare(owner, by_address)
        self._storages |= by_address
        if slot is not None:
            self._slots |= dict.fromkeys(fresh, slot)

    def slot_of(self, address: int) -> int | None:
        """Return the slot of what lies at this address; None for what is in none, such as a parameter."""
        return self._slots.get(address)

    def storage_at(self, address: int) -> torch.UntypedStorage | None:
        """Return the storage that was declared with this address; None where only the address was."""
        return self._storages.get(address)

    def declare(self, owner: Hashable, addresses: Iterable[int]) -> None:
        """Declare addresses that stay, in place of those that ``owner`` has declared before."""
        new = tuple(addresses)
        old = self._declared.get(owner, ())
        if new == old:
            return
        self._counts.update(new)
        self._counts.subtract(old)
        for address in old:
            if not self._counts[address]:
                del self._counts[address]
                self._storages.pop(address, None)
                self._slots.pop(address, None)
        if new:
            self._declared[owner] = new
        else:
            self._declared.pop(owner, None)

    def __contains__(self, address: int) -> bool:
        return address != 0 and address in self._counts
