"""What messages take: on their way, and of the time of the ranks at both ends, which could compute meanwhile.

A rank that computes on a CPU also copies what it sends and receives, and so do the threads of its network
library. That time is not on the way, and no schedule can hide it. So neighbours time two things::

    there and back     0 ── message ──> 1 ── message ──> 0      half of it: on the way, and both ends
    beside computing   0 and 1 compute, send, and take what came meanwhile; less computing alone: both ends

each with a small and a large message (L, o, G and O of the LogGOPS model, see `Cluster`). All pairs of
neighbours do so at the same time, since in a step they share the machines and the links. What both ends do
is no more than the processor time that it takes, whoever else uses the machine meanwhile; it is less where
threads of the network library have processors of their own.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from partita._torch.tensors.storage import has_memory
from partita.pipelining.interface.layout import empty_trailer, laid_out, trailer_of
from partita.planning import Cluster, LinkLevel
from partita.runtime import Comm, Handle, finish_all, wait_all

__all__ = ["LinkTimes", "cluster_of", "links_between", "measure_cluster"]

_LARGE = 2**17
"""Numbers in the large message: 512 KiB, as activations have. The small one has one."""
_ROUNDS = 9
_IN_A_ROW = 8
_COMPUTE_S = 1e-3
"""How long a rank computes between two messages."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class LinkTimes:
    """What a link takes, in seconds.

    Attributes:
        latency_s: before the first byte arrives.
        byte_s: for each byte.
        overhead_s: for which each end works for a message.
        overhead_s_per_byte: likewise, for each byte.
    """

    latency_s: float
    byte_s: float
    overhead_s: float
    overhead_s_per_byte: float

    @classmethod
    def of(cls, size: int, one_way_s: tuple[float, float], both_ends_s: tuple[float, float]) -> LinkTimes:
        """Fit what was measured with a small and a large message, which has `size` bytes more.

        Args:
            one_way_s: seconds from the send to the end of the receive.
            both_ends_s: the part of it for which the two ends work.
        """
        small_s, large_s = (max(seconds, 0.0) for seconds in both_ends_s)
        small_s = min(small_s, one_way_s[0])
        handling_s_per_byte = max(large_s - small_s, 0.0) / size
        one_way_s_per_byte = max(one_way_s[1] - one_way_s[0], 0.0) / size
        return cls(
            one_way_s[0] - small_s,
            max(one_way_s_per_byte - handling_s_per_byte, 0.0),
            small_s / 2,
            handling_s_per_byte / 2,
        )


def links_between(tensors: Iterable[Any]) -> Callable[[Comm], Cluster] | None:
    """What measures the links between ranks whose tensors are of this kind; None where they have no memory,
    and so nothing to send.
    """
    own = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if not all(map(has_memory, own)):
        return None
    device = next((tensor.device for tensor in own if tensor.device.type != "cpu"), _CPU)
    return partial(measure_cluster, device=device)


def measure_cluster(comm: Comm, device: torch.device = _CPU) -> Cluster:
    """Measure the links between neighbouring ranks, and return a cluster of equal ranks with such links.

    Collective, and the same on every rank. Links within a host and links between hosts are measured apart
    where ranks lie on their hosts in equal runs; elsewhere the slowest counts for all.

    Args:
        device: where this rank's tensors will be.
    """
    if comm.size == 1:
        return Cluster(1)
    neighbours = list(pairwise(range(comm.size)))
    comm.connect([*neighbours, *((after, before) for before, after in neighbours)], device)
    own: dict[int, LinkTimes] = {}
    for first in (0, 1):
        # Pairs that share no rank: 0-1, 2-3, ... and then 1-2, 3-4, ...
        pairs = [pair for pair in neighbours if pair[0] % 2 == first]
        probe = next((_Probe(comm, pair, device) for pair in pairs if comm.rank in pair), None)
        comm.barrier()
        if probe is not None:
            own[probe.pair[0]] = probe.times()
        comm.barrier()
    every: dict[int, LinkTimes] = {}
    hosts = []
    for host, measured in comm.all_gather_object((platform.node(), own)):
        every |= measured
        hosts.append(host)
    return cluster_of(hosts, [every[before] for before, _ in neighbours])


def cluster_of(hosts: Sequence[str], times: Sequence[LinkTimes]) -> Cluster:
    """A cluster with links between neighbours such as these.

    Args:
        hosts: of each rank.
        times: of the link between each rank and the next.
    """
    ranks = len(hosts)
    within = [one for one, (here, there) in zip(times, pairwise(hosts), strict=True) if here == there]
    between = [one for one, (here, there) in zip(times, pairwise(hosts), strict=True) if here != there]
    per_host = next((rank for rank in range(ranks) if hosts[rank] != hosts[0]), ranks)
    runs = [set(hosts[first : first + per_host]) for first in range(0, ranks, per_host)]
    in_equal_runs = ranks % per_host == 0 and all(len(run) == 1 for run in runs)
    if within and between and in_equal_runs and len(set(hosts)) == len(runs):
        return Cluster(ranks, levels=(_level(within, per_host), _level(between, None)))
    link = _level(times if not (within and between) else between, None)
    return Cluster(
        ranks,
        link.bandwidth_bytes_per_s,
        link.latency_s,
        overhead_s=link.overhead_s,
        overhead_s_per_byte=link.overhead_s_per_byte,
    )


def _level(times: Sequence[LinkTimes], ranks: int | None) -> LinkLevel:
    def median(values: Iterable[float]) -> float:
        return statistics.median(values)

    byte_s = median(one.byte_s for one in times)
    return LinkLevel(
        ranks,
        1.0 / byte_s if byte_s else math.inf,
        median(one.latency_s for one in times),
        overhead_s=median(one.overhead_s for one in times),
        overhead_s_per_byte=median(one.overhead_s_per_byte for one in times),
    )


class _Probe:
    """One end of a link while it is measured."""

    def __init__(self, comm: Comm, pair: tuple[int, int], device: torch.device) -> None:
        self.pair = pair
        self._comm = comm
        self._is_first = comm.rank == pair[0]
        self._peer = pair[1] if self._is_first else pair[0]
        self._device = device
        self._messages = [torch.zeros(size, device=device) for size in (1, _LARGE)]
        self._matrix = torch.full((256, 256), 1 / 256, device=device)

    def times(self) -> LinkTimes:
        """Measure; both ends call it at the same time, and get the same."""
        products = self._agreed(max, self._products())
        one_way_s = [self._one_way_s(message) for message in self._messages]
        both_ends_s = [self._both_ends_s(message, products) for message in self._messages]
        # The end that is faster waits for the other one, so what the slower one says is less.
        small, large = (self._agreed(min, seconds) for seconds in both_ends_s)
        there, large_there = (self._agreed(max, seconds) for seconds in one_way_s)
        size = self._messages[1].nbytes - self._messages[0].nbytes
        return LinkTimes.of(size, (there, large_there), (small, large))

    def _agreed(self, choose: Callable[[float, float], float], value: float) -> float:
        self._comm.send_object(value, self._peer)
        other: float = self._comm.recv_object(self._peer)
        return choose(value, other)

    def _products(self) -> float:
        """How many products of matrices take as long as a rank is to compute between two messages."""
        self._compute(_IN_A_ROW)
        seconds = self._timed(partial(self._compute, _IN_A_ROW)) / _IN_A_ROW
        return math.ceil(_COMPUTE_S / max(seconds, 1e-7))

    def _one_way_s(self, message: Tensor) -> float:
        def there_and_back() -> None:
            for sends in (self._is_first, not self._is_first):
                if sends:
                    wait_all(self._send(message))
                else:
                    self._receive(message).take()

        for _ in range(2):
            there_and_back()
        rounds = sorted(self._timed(there_and_back) for _ in range(2 * _ROUNDS))
        return rounds[_ROUNDS // 2] / 2  # the lower quartile: others on the machine only make it longer

    def _both_ends_s(self, message: Tensor, products: float) -> float:
        count = int(products)
        seconds, processor_s = [], []
        for number in range(1 + _ROUNDS):
            started_s = time.process_time()
            alone_s = self._timed(partial(self._compute, _IN_A_ROW * count))
            between_s = time.process_time()
            beside_s = self._timed(lambda: self._exchange(message, count))
            if number:
                seconds.append(beside_s - alone_s)
                processor_s.append(time.process_time() - 2 * between_s + started_s)
        return min(statistics.median(seconds), statistics.median(processor_s)) / _IN_A_ROW

    def _exchange(self, message: Tensor, count: int) -> None:
        """Compute, send, and take what the peer sent before it began to compute this time."""
        arriving: _Message | None = None
        leaving: list[Handle] = []
        for _ in range(_IN_A_ROW):
            following = self._receive(message)
            self._compute(count)
            sends = self._send(message)
            if arriving is not None:
                arriving.take()
                finish_all(leaving)
            arriving, leaving = following, sends
        if arriving is not None:
            arriving.take()
        wait_all(leaving)

    def _send(self, message: Tensor) -> list[Handle]:
        """As a pipeline sends a value: its numbers, and how they lie in memory."""
        trailer = trailer_of([message], [message])
        return [self._comm.send_together([message, trailer], self._peer, (0, 1))]

    def _receive(self, message: Tensor) -> _Message:
        data = torch.empty_like(message)
        trailer = empty_trailer([data])
        return _Message(data, trailer, self._comm.recv_together([data, trailer], self._peer, (0, 1)))

    def _compute(self, products: int) -> None:
        product = self._matrix
        for _ in range(products):
            product = product @ self._matrix

    def _timed(self, call: Callable[[], object]) -> float:
        started = time.perf_counter()
        call()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter() - started


@dataclass(frozen=True)
class _Message:
    """One that is being received."""

    data: Tensor
    trailer: Tensor
    handle: Handle

    def take(self) -> None:
        wait_all([self.handle])
        laid_out(self.trailer, [self.data])
