"""The machines that a plan is made for: how many ranks, how fast they and their links are, their memory."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import NamedTuple

from partita.errors import PlanError
from partita.planning import _json
from partita.planning._check import (
    require_amount,
    require_bandwidth,
    require_count,
    require_rate,
    require_seconds,
)
from partita.planning.hardware._sizes import read_bytes
from partita.planning.hardware.devices import Device, parse_devices
from partita.planning.hardware.links import LinkLevel, PairLink, slowed, slowest, with_ports

__all__ = ["Cluster"]


@dataclass(frozen=True)
class Cluster:
    """Ranks with α-β links between them: `n` bytes take ``latency_s + n / bandwidth``.

    (R. W. Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994.) Where messages also
    keep the processors busy that compute, as over sockets, each end works for ``overhead_s + n *
    overhead_s_per_byte`` besides: o and O of the LogGOPS model. (T. Hoefler, T. Schneider and A. Lumsdaine,
    "LogGOPSim: simulating large-scale applications in the LogGOPS model", HPDC 2010.) Ranks are equal, any
    two have a link of their own and it takes no time, unless more is said. A link carries one message at a
    time in each direction; others wait until it is free, in the order in which they are ready. So does a port
    that several ranks share, with one message out and one in: the bidirectional one-port model. (P. B. Bhat,
    C. S. Raghavendra and V. K. Prasanna, "Efficient collective communication in distributed heterogeneous
    systems", Journal of Parallel and Distributed Computing 63, 2003.)

    Attributes:
        ranks: how many processes there are.
        bandwidth_bytes_per_s: of one link in one direction; infinity where transfers cost nothing but
            latency.
        latency_s: seconds before the first byte arrives.
        memory_bytes: what one rank may hold; None where there is no limit.
        speeds: for each rank, how fast it computes, where 1.0 is as the costs were measured: a pass takes its
            seconds divided by the speed. None where all are 1.0.
        memories: for each rank, what it may hold; `memory_bytes` where it is None.
        levels: in place of one bandwidth and one latency: how ranks are joined within a node, between nodes
            and so on, nearest first; each level's groups are made of whole groups of the level before, and
            the last has one group of all.
        pairs: links of single pairs, which go before what the levels say.
        overhead_s: seconds for which the sender and the receiver of a message each work for it.
        overhead_s_per_byte: seconds that this takes more for each byte.

    Raises:
        PlanError: a value that is negative or no number, a speed or a bandwidth of zero, a list that has not
            one value a rank, or levels or pairs that don't fit the ranks.

    >>> Cluster(ranks=2, bandwidth_bytes_per_s=1e9, latency_s=1e-5).transfer_s(1_000_000)
    0.00101
    >>> near, far = LinkLevel(2, 4e9), LinkLevel(bandwidth_bytes_per_s=1e9, ports=1)
    >>> nodes = Cluster(ranks=4, levels=(near, far), speeds=(1.0, 1.0, 2.0, 2.0))
    >>> nodes.transfer_s(1_000_000, 0, 1), nodes.transfer_s(1_000_000, 1, 2)
    (0.00025, 0.001)
    """

    ranks: int
    bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    memory_bytes: int | None = None
    speeds: tuple[float, ...] | None = None
    memories: tuple[int | None, ...] | None = None
    levels: tuple[LinkLevel, ...] = ()
    pairs: tuple[PairLink, ...] = ()
    overhead_s: float = 0.0
    overhead_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        require_count(self.ranks, "ranks")
        for what in ("latency_s", "overhead_s", "overhead_s_per_byte"):
            require_seconds(getattr(self, what), what)
        require_bandwidth(self.bandwidth_bytes_per_s, "bandwidth_bytes_per_s")
        if self.memory_bytes is not None:
            require_amount(self.memory_bytes, "memory_bytes")
        # A list is taken too, but kept as what can be hashed and compared.
        for what in ("speeds", "memories", "levels", "pairs"):
            values = getattr(self, what)
            if isinstance(values, list):
                object.__setattr__(self, what, tuple(values))
        self._check_ranks()
        self._check_links()

    def _check_ranks(self) -> None:
        for what in ("speeds", "memories"):
            values = getattr(self, what)
            if values is not None and len(values) != self.ranks:
                raise PlanError(f"{what} has {len(values)} values for {self.ranks} ranks: give one a rank")
        for rank, speed in enumerate(self.speeds or ()):
            require_rate(speed, f"the speed of rank {rank}")
        for rank, memory in enumerate(self.memories or ()):
            if memory is not None:
                require_amount(memory, f"the memory of rank {rank}")

    def _check_links(self) -> None:
        alike = self.latency_s or self.overhead_s or self.overhead_s_per_byte
        if self.levels and (alike or self.bandwidth_bytes_per_s != math.inf):
            raise PlanError(
                f"there are {len(self.levels)} link levels, and bandwidth_bytes_per_s, latency_s or an "
                "overhead too: give the levels alone, each with its own"
            )
        inner = 1
        for number, level in enumerate(self.levels):
            group = self.ranks if level.ranks is None else level.ranks
            if level.ranks is not None and group % inner:
                raise PlanError(
                    f"link level {number} joins {group} ranks, the one before {inner}: give a multiple of it"
                )
            inner = group
        if inner < self.ranks and self.levels:
            raise PlanError(
                f"the last link level joins {inner} ranks of {self.ranks}: add one that joins all of them "
                "(ranks=None)"
            )
        seen: set[tuple[int, int]] = set()
        for pair in self.pairs:
            ends = (pair.sender, pair.receiver)
            if max(ends) >= self.ranks or ends[0] == ends[1]:
                raise PlanError(
                    f"there is a link from rank {ends[0]} to rank {ends[1]}: ranks are 0 to "
                    f"{self.ranks - 1}, and a link joins two"
                )
            if ends in seen:
                raise PlanError(f"there are two links from rank {ends[0]} to rank {ends[1]}: give one")
            seen.add(ends)

    @classmethod
    def of_nodes(
        cls,
        nodes: int,
        ranks_per_node: int,
        within: LinkLevel,
        between: LinkLevel,
        *,
        memory_bytes: int | None = None,
        speeds: Sequence[float] | None = None,
    ) -> Cluster:
        """Equal nodes of neighbouring ranks; the `ranks` of both levels are set.

        >>> within, between = LinkLevel(latency_s=1e-6), LinkLevel(latency_s=5e-6, ports=1)
        >>> Cluster.of_nodes(2, 8, within, between).transfer_s(0, sender=7, receiver=8)
        5e-06
        """
        require_count(nodes, "nodes")
        require_count(ranks_per_node, "ranks_per_node")
        return cls(
            nodes * ranks_per_node,
            memory_bytes=memory_bytes,
            speeds=None if speeds is None else tuple(speeds),
            levels=(replace(within, ranks=ranks_per_node), replace(between, ranks=None)),
        )

    @classmethod
    def of_devices(
        cls,
        devices: str | Sequence[Device],
        *,
        nodes: int | None = None,
        memory: int | str | None = None,
        dtype: str = "bfloat16",
        path: str | PathLike[str] | None = None,
    ) -> Cluster:
        """Ranks with a device each, in machines that are wired as the table of devices says.

        Args:
            devices: such as ``"16xH100"``, or ``"8xH100,8xA100"`` where they differ; or the device of each
                rank. Costs are meant for the first: the speeds of the others are relative to it. Links are
                those of the slowest device.
            nodes: how many machines; as many as it takes where it is not given.
            memory: what a rank may hold, in bytes or as text (``"80GB"``); all that its device has where it
                is not given.
            dtype: the one that devices of different kinds are compared by.
            path: a file of devices of your own, as in `partita.planning.devices`.

        Raises:
            PlanError: a device that is unknown, no multiple of `nodes`, or text that is no size.

        >>> cluster = Cluster.of_devices("16xH100", nodes=2, memory="64GB")
        >>> cluster.ranks, cluster.memory(0), cluster.transfer_s(450_000_000, 0, 1)
        (16, 64000000000, 0.0010034)
        """
        kinds = parse_devices(devices, path) if isinstance(devices, str) else tuple(devices)
        count = len(kinds)
        require_count(count, "the number of devices")
        if nodes is not None:
            require_count(nodes, "nodes")
            if count % nodes:
                raise PlanError(
                    f"there are {count} devices for {nodes} nodes: give a multiple, or other nodes"
                )
        per_node = min(count, kinds[0].ranks_per_node) if nodes is None else count // nodes
        limit = None if memory is None else read_bytes(memory, "memory")
        sizes = [kind.memory_bytes if limit is None else limit for kind in kinds]
        speeds = [kind.flops(dtype) / kinds[0].flops(dtype) for kind in kinds]
        within = slowest([kind.within_node for kind in kinds])
        between = slowest([with_ports(kind.between_nodes, per_node, kind.ranks_per_node) for kind in kinds])
        one_node = per_node == count
        return cls(
            count,
            memory_bytes=sizes[0] if len(set(sizes)) == 1 else None,
            memories=None if len(set(sizes)) == 1 else tuple(sizes),
            speeds=None if set(speeds) == {1.0} else tuple(speeds),
            levels=(replace(within, ranks=None),) if one_node else (replace(within, ranks=per_node), between),
        )

    def speed(self, rank: int) -> float:
        """How fast `rank` computes; 1.0 is as the costs were measured."""
        self._require_rank(rank)
        return 1.0 if self.speeds is None else self.speeds[rank]

    def memory(self, rank: int) -> int | None:
        """How many bytes `rank` may hold; None where there is no limit."""
        self._require_rank(rank)
        memory = None if self.memories is None else self.memories[rank]
        return self.memory_bytes if memory is None else memory

    def transfer_s(self, size_bytes: int, sender: int | None = None, receiver: int | None = None) -> float:
        """Seconds that one message takes on its way, once the link is free. An empty one takes the latency.

        Args:
            size_bytes: of the message.
            sender: the rank that sends; without both ranks, the slowest link that there is counts.
            receiver: the rank that receives; nothing is sent to the sender itself.
        """
        require_amount(size_bytes, "size_bytes")
        if (sender is None) != (receiver is None):
            raise PlanError(
                f"the sender is {sender}, the receiver {receiver}: give both, or none for the slowest link"
            )
        if sender is None or receiver is None:
            return max(link.latency_s + size_bytes / link.bandwidth_bytes_per_s for link in self._kinds)
        if sender == receiver:
            self._require_rank(sender)
            return 0.0
        _, link = self._level(sender, receiver)
        return link.latency_s + size_bytes / link.bandwidth_bytes_per_s

    def handling_s(self, size_bytes: int, sender: int, receiver: int) -> float:
        """Seconds for which each of the two ranks works for one message; 0.0 where they are the same.

        >>> Cluster(2, overhead_s=1e-4, overhead_s_per_byte=1e-9).handling_s(100_000, 0, 1)
        0.0002
        """
        require_amount(size_bytes, "size_bytes")
        if sender == receiver:
            self._require_rank(sender)
            return 0.0
        _, link = self._level(sender, receiver)
        return link.overhead_s + size_bytes * link.overhead_s_per_byte

    @property
    def has_handling(self) -> bool:
        """Whether any rank works for messages."""
        return any(link.overhead_s or link.overhead_s_per_byte for link in self._kinds)

    def link(self, sender: int, receiver: int) -> Hashable:
        """What names the link that messages leave `sender` by: equal for pairs that share it."""
        return self.links(sender, receiver)[0]

    def links(self, sender: int, receiver: int) -> tuple[Hashable, ...]:
        """Every link that a message occupies on its way; it starts when all of them are free.

        One for a pair that has its own; where ports are shared, that of the sender's group out and that of
        the receiver's in.
        """
        number, link = self._level(sender, receiver)
        if isinstance(link, PairLink):
            return (link.name or (sender, receiver),)
        if link.ports is None:
            return ((sender, receiver),)
        inner = (self.levels[number - 1].ranks or self.ranks) if number else 1
        return tuple(
            (way, number, rank // inner, rank % inner * link.ports // inner)
            for way, rank in (("out", sender), ("in", receiver))
        )

    def all_reduce_s(self, size_bytes: int, ranks: Sequence[int] | None = None) -> float:
        """Seconds to sum over r ranks by a ring: ``2 (r - 1)`` steps of an r-th of the bytes each.

        (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        2009.) Each rank sends to the next and the last to the first; a step takes the largest latency and the
        smallest bandwidth of these links, where a link that serves n of them has an n-th of its bandwidth.
        In each step a rank works for the message that it sends and for the one that it takes.

        Args:
            size_bytes: of the tensor that each rank has.
            ranks: those that sum; all where it is not given.
        """
        require_amount(size_bytes, "size_bytes")
        ring = self._ring if ranks is None else self._ring_of(tuple(ranks))
        return ring.seconds(size_bytes)

    def slowed(self, factor: float) -> Cluster:
        """The same with links on which everything takes `factor` times as long. Ranks work for messages as
        long as before.
        """
        require_rate(factor, "factor")
        return replace(
            self,
            latency_s=self.latency_s * factor,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / factor,
            levels=tuple(slowed(level, factor) for level in self.levels),
            pairs=tuple(slowed(pair, factor) for pair in self.pairs),
        )

    def to_json(self) -> str:
        """JSON text that `from_json` reads back into an equal cluster."""
        return _json.write(self, "partita.cluster")

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Read what `to_json` wrote; PlanError says where the text is wrong."""
        return _json.read(text, cls, "partita.cluster")

    def _require_rank(self, rank: int) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.ranks:
            raise PlanError(f"there is no rank {rank!r:.60}: ranks are 0 to {self.ranks - 1}")

    def _level(self, sender: int, receiver: int) -> tuple[int, LinkLevel | PairLink]:
        """What joins two ranks, and which level that is: -1 for a pair's own."""
        self._require_rank(sender)
        self._require_rank(receiver)
        pair = self._pair_links.get((sender, receiver))
        if pair is not None:
            return -1, pair
        for number, level in enumerate(self._levels):
            if level.ranks is None or sender // level.ranks == receiver // level.ranks:
                return number, level
        raise AssertionError("unreachable: the last level joins all ranks")

    @cached_property
    def _levels(self) -> tuple[LinkLevel, ...]:
        alike = LinkLevel(
            None,
            self.bandwidth_bytes_per_s,
            self.latency_s,
            overhead_s=self.overhead_s,
            overhead_s_per_byte=self.overhead_s_per_byte,
        )
        return self.levels or (alike,)

    @cached_property
    def _pair_links(self) -> dict[tuple[int, int], PairLink]:
        return {(pair.sender, pair.receiver): pair for pair in self.pairs}

    @cached_property
    def _kinds(self) -> tuple[LinkLevel | PairLink, ...]:
        """Every kind of link, each once."""
        inner, kinds = 1, []
        for level in self._levels:
            # A level whose groups are no larger than those of the level before joins nobody.
            group = min(self.ranks, level.ranks or self.ranks)
            if group > inner or self.ranks == 1:
                kinds.append(level)
            inner = group
        return (*kinds, *self.pairs)

    @cached_property
    def _ring(self) -> _Ring:
        return self._ring_of(range(self.ranks))

    def _ring_of(self, ranks: Sequence[int]) -> _Ring:
        hops = list(zip(ranks, (*ranks[1:], ranks[0]), strict=True)) if len(ranks) > 1 else []
        uses: dict[Hashable, int] = {}
        for hop in hops:
            for name in self.links(*hop):
                uses[name] = uses.get(name, 0) + 1
        latency_s, byte_s = 0.0, 0.0
        for hop in hops:
            _, link = self._level(*hop)
            sharing = max(uses[name] for name in self.links(*hop))
            latency_s = max(latency_s, link.latency_s)
            byte_s = max(byte_s, sharing / link.bandwidth_bytes_per_s)
        joined = [self._level(*hop)[1] for hop in hops]
        overhead_s = max((link.overhead_s for link in joined), default=0.0)
        overhead_byte_s = max((link.overhead_s_per_byte for link in joined), default=0.0)
        return _Ring(len(ranks), latency_s + 2 * overhead_s, byte_s + 2 * overhead_byte_s)


class _Ring(NamedTuple):
    """Ranks that sum by a ring, and what one of its steps takes: as such, and for each byte."""

    ranks: int
    step_s: float
    byte_s: float

    def seconds(self, size_bytes: int) -> float:
        return 2 * (self.ranks - 1) * (self.step_s + size_bytes / self.ranks * self.byte_s)
