"""The links between ranks: levels of them (within a node, between nodes), and single pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from partita.planning._check import require_amount, require_bandwidth, require_count, require_seconds

__all__ = ["LinkLevel", "PairLink", "slowed", "slowest", "with_ports"]


@dataclass(frozen=True)
class LinkLevel:
    """How ranks are joined that lie in one group and in no smaller one: within a node, between nodes.

    A level's groups are equal runs of neighbouring ranks: with ``ranks=8``, 0 to 7 are one and 8 to 15 the
    next.

    Attributes:
        ranks: how many ranks a group has; None for one group of all.
        bandwidth_bytes_per_s: of one link in one direction.
        latency_s: seconds before the first byte arrives.
        ports: how many links join each group of the level before (each rank, on the first level) to the
            others, as network cards join a node: the ranks of the group are shared out evenly among them,
            neighbours first. A port carries one message out and one message in at a time, whoever the other
            end is. None: every pair of ranks has a link of its own.
        overhead_s: seconds for which each of the two ranks works for a message, and can't compute.
        overhead_s_per_byte: seconds that this takes more for each byte, where ranks copy messages themselves.

    Raises:
        PlanError: a number that is out of range.

    >>> nvlink = LinkLevel(ranks=8, bandwidth_bytes_per_s=450e9, latency_s=2e-6)
    >>> one_card = LinkLevel(bandwidth_bytes_per_s=50e9, latency_s=5e-6, ports=1)
    """

    ranks: int | None = None
    bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    ports: int | None = None
    overhead_s: float = 0.0
    overhead_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks is not None:
            require_count(self.ranks, "ranks of a link level")
        if self.ports is not None:
            require_count(self.ports, "ports of a link level")
        require_bandwidth(self.bandwidth_bytes_per_s, "bandwidth_bytes_per_s of a link level")
        for what in ("latency_s", "overhead_s", "overhead_s_per_byte"):
            require_seconds(getattr(self, what), f"{what} of a link level")


@dataclass(frozen=True)
class PairLink:
    """The link from one rank to another, in that direction, in place of what the level says.

    Attributes:
        sender: the rank that sends.
        receiver: the rank that receives.
        bandwidth_bytes_per_s: of the link.
        latency_s: seconds before the first byte arrives.
        name: pairs with the same name share one link, which carries one message at a time; empty where the
            link is the pair's own.
        overhead_s: as in `LinkLevel`.
        overhead_s_per_byte: likewise.

    Raises:
        PlanError: a number that is out of range.
    """

    sender: int
    receiver: int
    bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    name: str = ""
    overhead_s: float = 0.0
    overhead_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        require_amount(self.sender, "sender of a link")
        require_amount(self.receiver, "receiver of a link")
        between = f"of the link from rank {self.sender} to rank {self.receiver}"
        require_bandwidth(self.bandwidth_bytes_per_s, f"bandwidth_bytes_per_s {between}")
        for what in ("latency_s", "overhead_s", "overhead_s_per_byte"):
            require_seconds(getattr(self, what), f"{what} {between}")


L = TypeVar("L", LinkLevel, PairLink)


def slowed(link: L, factor: float) -> L:
    """The same link, on which everything takes `factor` times as long. The ranks work for it as before.

    >>> slowed(LinkLevel(latency_s=1e-6), 2.0).latency_s
    2e-06
    """
    return replace(
        link,
        latency_s=link.latency_s * factor,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor,
    )


def slowest(levels: Sequence[LinkLevel]) -> LinkLevel:
    """A level with the largest latency and overheads, the smallest bandwidth and the fewest ports."""
    counts = [level.ports for level in levels if level.ports is not None]
    return LinkLevel(
        None,
        min(level.bandwidth_bytes_per_s for level in levels),
        max(level.latency_s for level in levels),
        min(counts, default=None),
        max(level.overhead_s for level in levels),
        max(level.overhead_s_per_byte for level in levels),
    )


def with_ports(level: LinkLevel, ranks: int, usual_ranks: int) -> LinkLevel:
    """A level whose groups have `ranks` in place of `usual_ranks`, with as many ports a rank as before."""
    if level.ports is None:
        return level
    return replace(level, ports=max(1, level.ports * ranks // usual_ranks))
