"""Which gradients to reduce together, so that as little of the communication as can be shows."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from partita.errors import PlanError
from partita.planning import _json
from partita.planning._check import require_amount, require_count, require_seconds
from partita.planning.cluster import Cluster

__all__ = ["BucketPlan", "Gradient", "plan_buckets"]


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
) -> BucketPlan:
    """Put gradients into buckets, each a run of neighbours in the order in which they get ready.

    A bucket's all-reduce (`Cluster.all_reduce_s`) starts when its last gradient is ready and the bucket
    before is reduced. Small buckets start early but pay the latency often; large ones the other way round.

    Without a cap, the buckets are those whose reduction ends first; no others end sooner. With a cap, a
    bucket is closed as soon as it holds at least so many bytes, as data-parallel wrappers do. Gradients that
    can't share a bucket (other data types or devices) are planned by a call each.

    Args:
        gradients: in any order; those ready at the same time keep the order given.
        cluster: the ranks and their links.
        bucket_cap_bytes: close a bucket at this size, rather than look for the best.
        first_bucket_cap_bytes: another cap for the first bucket, so that communication starts early.

    Raises:
        PlanError: no gradients, two of one name, or a cap below 1.

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
    ordered = sorted(gradients, key=lambda gradient: gradient.ready_s)
    if bucket_cap_bytes is None:
        ends = _best_ends(ordered, cluster)
    else:
        ends = _capped_ends(ordered, bucket_cap_bytes, first_bucket_cap_bytes or bucket_cap_bytes)
    return _timed(ordered, ends, cluster)


def _capped_ends(ordered: Sequence[Gradient], cap: int, first_cap: int) -> list[int]:
    ends, held, limit = [], 0, first_cap
    for index, gradient in enumerate(ordered, 1):
        held += gradient.size_bytes
        if held >= limit or index == len(ordered):
            ends.append(index)
            held, limit = 0, cap
    return ends


def _best_ends(ordered: Sequence[Gradient], cluster: Cluster) -> list[int]:
    """Where the buckets end, so that the last reduction ends as early as can be.

    With ``end[i]`` the earliest end of the first i gradients (it never falls with i), a last bucket from i to
    j ends at ``max(ready[j], end[i]) + latency + bytes(i, j) * per_byte``. Where ``end[i] <= ready[j]`` the
    largest i is best; among the i after it, the one with the least ``end[i] - bytes(0, i) * per_byte``, which
    a sliding window knows. Linear but for the sort.
    """
    latency = cluster.all_reduce_s(0)
    before = [
        cluster.all_reduce_s(size) - latency
        for size in accumulate((g.size_bytes for g in ordered), initial=0)
    ]
    end = [0.0]
    start_of = [0]
    window: deque[tuple[float, int]] = deque()
    for index, gradient in enumerate(ordered, 1):
        fresh = (end[-1] - before[index - 1], index - 1)
        while window and window[-1][0] >= fresh[0]:
            window.pop()
        window.append(fresh)
        free = bisect_right(end, gradient.ready_s) - 1
        while window and window[0][1] <= free:
            window.popleft()
        options = [] if free < 0 else [(gradient.ready_s - before[free], free)]
        best, start = min(options + list(window)[:1])
        end.append(best + latency + before[index])
        start_of.append(start)
    ends = [len(ordered)]
    while start_of[ends[-1]]:
        ends.append(start_of[ends[-1]])
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
