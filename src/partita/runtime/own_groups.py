"""The process groups that a comm makes for itself, and how it ends what they do.

- data: gloo, all ranks. Its protocol is full duplex and matches by tag, so one connection a pair is enough.
- reduce, one a subset: gloo or NCCL, made at the first collective over that subset.
- pair, one a direction: NCCL only, where the operations of one communicator run in order, so that each
  direction needs its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from partita._torch.distributed.groups import (
    RawGroup,
    Store,
    abort_gloo,
    abort_nccl,
    gloo_group,
    nccl_group,
    prefixed,
)
from partita.errors import ExecutionError
from partita.runtime.interruptible import interruptible

__all__ = ["OwnGroups"]


class OwnGroups:
    """Those of one rank.

    Args:
        store: where their members find each other.
        timeout_s: of their operations, and of making a group.
        check_usable: raises where the comm has failed.
        meet: returns when all members have called it.
        explain: what to raise for an error of the system's with these members, in words what failed.

    Attributes:
        made: by name.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        check_usable: Callable[[], None],
        meet: Callable[[tuple[int, ...]], None],
        explain: Callable[[RuntimeError, tuple[int, ...], str], ExecutionError],
    ) -> None:
        self.made: dict[str, RawGroup] = {}
        self._store = store
        self._rank = rank
        self._everybody = tuple(range(size))
        self._timeout_s = timeout_s
        self._check_usable = check_usable
        self._meet = meet
        self._explain = explain

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
            self._meet(members)
            self._gloo(name, members)
        return self.made[name]

    def abort(self) -> None:
        """End whatever this rank waits for, and show its peers closed connections."""
        for name, group in list(self.made.items()):
            if name.startswith("nccl/"):
                abort_nccl(group)
            else:
                abort_gloo(group)

    def _gloo(self, name: str, members: tuple[int, ...]) -> RawGroup:
        store = prefixed(self._store, name)
        make = partial(gloo_group, store, members.index(self._rank), len(members), self._timeout_s)
        self.made[name] = self._connected(name, members, make)
        return self.made[name]

    def _nccl(self, name: str, members: tuple[int, ...]) -> RawGroup:
        if name not in self.made:
            self._meet(members)  # at its first operation NCCL waits for all, deaf to failures
            place, size = members.index(self._rank), len(members)

            def make() -> RawGroup:
                return nccl_group(prefixed(self._store.clone(), name), place, size, self._timeout_s)

            self.made[name] = self._connected(name, members, make)
        return self.made[name]

    def _connected(self, name: str, members: tuple[int, ...], make: Callable[[], RawGroup]) -> RawGroup:
        """All members are there, so this takes no time, unless one of them or the store is gone."""
        what = f"connecting group {name!r}"
        try:
            return interruptible(make, self._timeout_s, what, self._check_usable)
        except ExecutionError:
            raise
        except RuntimeError as error:
            others = tuple(member for member in members if member != self._rank)
            raise self._explain(error, others, what) from error
