"""The process groups that a comm makes for itself, and how it ends what they do.

- data: gloo, all ranks. Its protocol is full duplex and matches by tag, so one connection a pair is enough.
- watch: gloo, all ranks. Carries nothing, tells when a process is gone (see :mod:`~partita.runtime.failure`).
- reduce, one a subset: gloo or NCCL, made at the first collective over that subset.
- pair, one a direction: NCCL only, where the operations of one communicator run in order, so that each
  direction needs its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from partita._torch.distributed import (
    RawGroup,
    Store,
    abort_gloo,
    abort_nccl,
    gloo_group,
    nccl_group,
    prefixed,
)

__all__ = ["OwnGroups"]


class OwnGroups:
    """Those of one rank.

    Args:
        store: where their members find each other.
        timeout_s: of their operations.
        check_usable: raises where the comm has failed.

    Attributes:
        made: by name.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, check_usable: Callable[[], None]
    ) -> None:
        self.made: dict[str, RawGroup] = {}
        self._store = store
        self._rank = rank
        self._everybody = tuple(range(size))
        self._timeout_s = timeout_s
        self._check_usable = check_usable

    def of_all(self, name: str) -> RawGroup:
        """A gloo group of all ranks, who make it at the same time."""
        return self._gloo(name, self._everybody)

    def pair(self, src: int, dst: int) -> RawGroup:
        """The NCCL communicator of one direction; the sender is its member 0."""
        return self._nccl(f"nccl/{src}>{dst}", (src, dst))

    def collective(self, members: tuple[int, ...], *, nccl: bool) -> RawGroup:
        """That of a subset of the ranks."""
        if nccl:
            return self._nccl(f"nccl/reduce/{members}", members)
        if members == self._everybody:
            return self.made["data"]
        name = f"reduce/{members}"
        if name not in self.made:
            self._meet(name, members)
            self._gloo(name, members)
        return self.made[name]

    def abort(self) -> None:
        """End whatever this rank waits for, and show its peers closed connections."""
        for name, group in list(self.made.items()):
            if name.startswith("nccl/"):
                abort_nccl(group)
            elif name != "watch":
                abort_gloo(group)

    def _gloo(self, name: str, members: tuple[int, ...]) -> RawGroup:
        store = prefixed(self._store, name)
        self.made[name] = gloo_group(store, members.index(self._rank), len(members), self._timeout_s)
        return self.made[name]

    def _nccl(self, name: str, members: tuple[int, ...]) -> RawGroup:
        if name not in self.made:
            self._meet(name, members)  # at its first operation NCCL waits for all, deaf to failures
            store = prefixed(self._store.clone(), name)
            self.made[name] = nccl_group(store, members.index(self._rank), len(members), self._timeout_s)
        return self.made[name]

    def _meet(self, name: str, members: tuple[int, ...]) -> None:
        """Wait for all members of a new group, in a way that a failure interrupts; making the group then
        takes no time.
        """
        self._store.set(f"{name}/here/{self._rank}", "1")
        keys = [f"{name}/here/{rank}" for rank in members]
        pause = threading.Event()
        while not self._store.check(keys):
            pause.wait(0.002)
            self._check_usable()
