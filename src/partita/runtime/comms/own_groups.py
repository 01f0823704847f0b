"""The process groups that a comm makes for itself.

- data: gloo, all ranks. Its protocol is full duplex and matches by tag, so one connection a pair is enough.
- reduce, one a subset: gloo or NCCL, made at the first collective over that subset.
- pair, one a direction: NCCL only, where the operations of one communicator run in order, so that each
  direction needs its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from partita.runtime.failures.interruptible import interruptible

__all__ = ["OwnGroups"]


class OwnGroups:
    """The groups of one rank.

    Args:
        store: where their members find each other.
        timeout_s: of their operations, and of making a group.
        check_usable: raises where the comm has failed.
        meet: returns when all members have called it.
        explain: returns what to raise for an error of torch's, given the other members and what has failed.

    Attributes:
        by_name: the groups that have been made.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        check_usable: Callable[[], None],
        meet: Callable[[tuple[int, ...]], None],
        explain: Callable[[RuntimeError, Sequence[int], str], ExecutionError],
    ) -> None:
        self.by_name: dict[str, RawGroup] = {}
        self._store = store
        self._rank = rank
        self._everybody = tuple(range(size))
        self._timeout_s = timeout_s
        self._check_usable = check_usable
        self._meet = meet
        self._explain = explain

    def of_all(self, name: str) -> RawGroup:
        """Make a gloo group of all ranks, which all make it at the same time."""
        return self._gloo(name, self._everybody)

    def pair(self, src: int, dst: int) -> RawGroup:
        """Return the NCCL communicator of one direction; the sender is its member 0."""
        return self._nccl(f"nccl/{src}>{dst}", (src, dst))

    def collective(self, members: tuple[int, ...], *, nccl: bool) -> RawGroup:
        """Return the group of a subset of the ranks."""
        if nccl:
            return self._nccl(f"nccl/reduce/{members}", members)
        if members == self._everybody:
            return self.by_name["data"]
        name = f"reduce/{members}"
        if name not in self.by_name:
            self._meet(members)
            self._gloo(name, members)
        return self.by_name[name]

    def abort(self) -> None:
        """End whatever this rank waits for, and show its peers closed connections."""
        for name, group in list(self.by_name.items()):
            if name.startswith("nccl/"):
                abort_nccl(group)
            else:
                abort_gloo(group)

    def _gloo(self, name: str, members: tuple[int, ...]) -> RawGroup:
        store = prefixed(self._store, name)
        make = partial(gloo_group, store, members.index(self._rank), len(members), self._timeout_s)
        self.by_name[name] = self._connected(name, members, make)
        return self.by_name[name]

    def _nccl(self, name: str, members: tuple[int, ...]) -> RawGroup:
        if name not in self.by_name:
            self._meet(members)  # NCCL would wait for all at its first operation, whatever failed
            place, size = members.index(self._rank), len(members)

            def make() -> RawGroup:
                return nccl_group(prefixed(self._store.clone(), name), place, size, self._timeout_s)

            self.by_name[name] = self._connected(name, members, make)
        return self.by_name[name]

    def _connected(self, name: str, members: tuple[int, ...], make: Callable[[], RawGroup]) -> RawGroup:
        """Make a group whose members are all there: it blocks only where one of them or the store is gone."""
        what = f"connecting group {name!r}"
        try:
            return interruptible(make, self._timeout_s, what, self._check_usable)
        except ExecutionError:
            raise
        except RuntimeError as error:
            others = tuple(member for member in members if member != self._rank)
            raise self._explain(error, others, what) from None
