"""Which gradients to reduce together, so that as little of the communication as can be shows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from partita.errors import PlanError
from partita.planning import _json
from partita.planning._check import require_amount, require_count, require_part, require_seconds
from partita.planning.hardware.cluster import Cluster

__all__ = ["BucketPlan", "Gradient", "plan_buckets"]

_ALONE = 0.1
"""The part of its time that a bucket loses while no other is under way."""
_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Buckets are looked for that hold no more than all bytes divided by one of these."""


@dataclass(frozen=True)
class Gradient:
    """One gradient: name, size, and when it is ready, in seconds from the start of the backward pass."""

    name: str
    size_bytes: int
    ready_s: float

    def __post_init__(self) -> None:
        require_amount(self.size_bytes, f"size_bytes of gradient {self.name!r}")
        require_seconds(self.ready_s, f"ready_s of gradient {self.name!r}")


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which they are reduced, one after another.

    Attributes:
        buckets: the names of the gradients in each, in the order in which they get ready.
        bucket_bytes: the size of each.
        start_s: when the reduction of each starts, from the start of the backward pass.
        end_s: when it ends.
        exposed_s: how long the last one goes on after the last gradient is ready: the communication that
            nothing hides.
    """

    buckets: tuple[tuple[str, ...], ...]
    bucket_bytes: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    exposed_s: float

    def to_json(self) -> str:
        """JSON text that `from_json` reads back into an equal plan."""
        return _json.write(self, "partita.buckets")

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """Read what `to_json` wrote; PlanError says where the text is wrong."""
        return _json.read(text, cls, "partita.buckets")


def plan_buckets(
    gradients: Sequence[Gradient],
    cluster: Cluster,
    *,
    bucket_cap_bytes: int | None = None,
    first_bucket_cap_bytes: int | None = None,
    margin: float = 0.0,
    bucket_s: float = 0.0,
) -> BucketPlan:
    """Put gradients into buckets, each a run of neighbours in the order in which they get ready.

    A bucket's all-reduce (`Cluster.all_reduce_s`) starts when its last gradient is ready and the bucket
    before is reduced. Small buckets start early but pay the latency often; large ones the other way round.

    Without a cap, the buckets are those whose reduction ends first; no others end sooner, and of those that
    end as soon there are no fewer. With a cap, a bucket is closed as soon as it holds at least so many bytes,
    as data-parallel wrappers do. Gradients that can't share a bucket (other data types or devices) are
    planned by a call each.

    Args:
        gradients: in any order; those ready at the same time keep the order given.
        cluster: the ranks and their links.
        bucket_cap_bytes: close a bucket at this size, rather than look for the best.
        first_bucket_cap_bytes: another cap for the first bucket, so that communication starts early.
        margin: without a cap: by which part an all-reduce may take longer, or shorter, than ``cluster``
            says. Few buckets wait on purpose: where the links are faster they stand idle meanwhile, and where
            they are slower the last bucket is late. With a margin, the buckets are those that lose least, on
            the worst of the fastest, the slowest and the expected links, against the best for these; and a
            tenth of the time of the largest bucket counts as lost, for the links stand idle between its
            steps while no other is under way. The times of the plan are those that ``cluster`` says.
        bucket_s: with a margin: what each bucket costs in computing, in seconds, whenever it is sent.

    Raises:
        PlanError: no gradients, two of one name, a cap below 1, or a margin or cost that is negative.

    >>> ready = [Gradient("c", 4, 1.0), Gradient("b", 4, 2.0), Gradient("a", 4, 3.0)]
    >>> plan_buckets(ready, Cluster(ranks=2, bandwidth_bytes_per_s=4.0, latency_s=0.1)).buckets
    (('c',), ('b',), ('a',))
    >>> plan_buckets(ready, Cluster(ranks=2, bandwidth_bytes_per_s=4.0), bucket_cap_bytes=8).buckets
    (('c', 'b'), ('a',))
    """
    require_count(len(gradients), "the number of gradients")
    for what, cap in (
        ("bucket_cap_bytes", bucket_cap_bytes),
        ("first_bucket_cap_bytes", first_bucket_cap_bytes),
    ):
        if cap is not None:
            require_count(cap, what)
    if first_bucket_cap_bytes is not None and bucket_cap_bytes is None:
        raise PlanError("first_bucket_cap_bytes is given without bucket_cap_bytes: give both or none")
    if len({gradient.name for gradient in gradients}) < len(gradients):
        raise PlanError("two gradients have the same name: give each its own")
    require_part(margin, "margin")
    require_seconds(bucket_s, "bucket_s")
    ordered = sorted(gradients, key=lambda gradient: gradient.ready_s)
    ends: Sequence[int]
    if bucket_cap_bytes is not None:
        ends = _capped_ends(ordered, bucket_cap_bytes, first_bucket_cap_bytes or bucket_cap_bytes)
    elif margin:
        ends = _robust_ends(ordered, cluster, margin, bucket_s)
    else:
        ends = _fewest_ends(ordered, cluster)
    return _timed(ordered, ends, cluster)


def _capped_ends(ordered: Sequence[Gradient], cap: int, first_cap: int) -> list[int]:
    ends, filled, limit = [], 0, first_cap
    for index, gradient in enumerate(ordered, 1):
        filled += gradient.size_bytes
        if filled >= limit or index == len(ordered):
            ends.append(index)
            filled, limit = 0, cap
    return ends


def _robust_ends(
    ordered: Sequence[Gradient], cluster: Cluster, margin: float, bucket_s: float
) -> Sequence[int]:
    """Of the best buckets for several speeds and several largest sizes, those that lose least."""
    clusters = [cluster, cluster.slowed(1 + margin), cluster.slowed(1 / (1 + margin))]
    best = [tuple(_fewest_ends(ordered, links)) for links in clusters]
    best_s = [_timed(ordered, ends, links).end_s[-1] for ends, links in zip(best, clusters, strict=True)]
    total = sum(gradient.size_bytes for gradient in ordered)
    sized = (tuple(_fewest_ends(ordered, links, total // parts)) for links in clusters for parts in _PARTS)

    def loss_s(ends: tuple[int, ...]) -> float:
        plans = [_timed(ordered, ends, links) for links in clusters]
        late_s = max(plan.end_s[-1] - earliest for plan, earliest in zip(plans, best_s, strict=True))
        alone_s = _ALONE * cluster.all_reduce_s(max(plans[0].bucket_bytes))
        return late_s + bucket_s * len(ends) + alone_s

    return min({*best, *sized}, key=lambda ends: (loss_s(ends), len(ends), ends))


def _fewest_ends(ordered: Sequence[Gradient], cluster: Cluster, largest: int | None = None) -> list[int]:
    """Where the buckets end, so that the last reduction ends as early as can be, with as few as can be.

    A bucket from i to j takes ``latency + bytes(i, j) * per_byte``. Gradients that are taken off the end of a
    plan save at least the time of their bytes, so ``end[i] - bytes(0, i) * per_byte`` never falls with i,
    where ``end[i]`` is the earliest end of the first i gradients. Two things follow. The earliest end of the
    first j has a last bucket from the largest i with ``end[i] <= ready[j]``, or from the one after it.
    And, from the back, with a time at which all has to be over: the largest last bucket that is over in time
    leaves the gradients before it time enough, and no other leaves fewer buckets to them. All that also holds
    where no bucket of several gradients may have more than ``largest`` bytes.
    """
    latency = cluster.all_reduce_s(0)
    sizes = list(accumulate((g.size_bytes for g in ordered), initial=0))
    before = [cluster.all_reduce_s(size) - latency for size in sizes]

    def first_allowed(stop: int) -> int:
        return 0 if largest is None else min(bisect_left(sizes, sizes[stop] - largest), stop - 1)

    end, start_of = [0.0], [0]
    for index, gradient in enumerate(ordered, 1):
        free = bisect_right(end, gradient.ready_s) - 1
        least = first_allowed(index)
        starts = {min(max(start, least), index - 1) for start in (free, free + 1)}
        best, start = min((max(gradient.ready_s, end[start]) - before[start], start) for start in starts)
        end.append(best + latency + before[index])
        start_of.append(start)
    over_s, stop, ends = end[-1], len(ordered), []
    while stop:
        ends.append(stop)
        latest_s = over_s - latency - before[stop]
        in_time = bisect_left(before, ordered[stop - 1].ready_s - latest_s, 0, start_of[stop])
        start = max(in_time, first_allowed(stop))
        over_s, stop = latest_s + before[start], start
    return ends[::-1]


def _timed(ordered: Sequence[Gradient], ends: Sequence[int], cluster: Cluster) -> BucketPlan:
    sizes, starts, stops, free_s = [], [], [], 0.0
    runs = [ordered[first:end] for first, end in pairwise((0, *ends))]
    for run in runs:
        size = sum(gradient.size_bytes for gradient in run)
        start_s = max(free_s, run[-1].ready_s)
        free_s = start_s + cluster.all_reduce_s(size)
        sizes.append(size)
        starts.append(start_s)
        stops.append(free_s)
    return BucketPlan(
        buckets=tuple(tuple(gradient.name for gradient in run) for run in runs),
        bucket_bytes=tuple(sizes),
        start_s=tuple(starts),
        end_s=tuple(stops),
        exposed_s=free_s - ordered[-1].ready_s,
    )
