from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import PlanError
from partita.planning import BucketPlan, Cluster, Gradient, plan_buckets

gradient_lists = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 12).map(float)), min_size=1, max_size=8
).map(lambda pairs: [Gradient(f"g{index}", size, ready) for index, (size, ready) in enumerate(pairs)])
clusters = st.builds(
    Cluster, st.sampled_from([1, 2, 4]), st.sampled_from([0.5, 2.0, 8.0]), st.sampled_from([0.0, 0.25, 2.0])
)


def earliest_end(gradients: list[Gradient], cluster: Cluster) -> float:
    """Of all ways to cut the gradients into buckets, the earliest end."""
    ordered = sorted(gradients, key=lambda gradient: gradient.ready_s)
    best = float("inf")
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            end = 0.0
            for first, last in pairwise((0, *cuts, len(ordered))):
                size = sum(gradient.size_bytes for gradient in ordered[first:last])
                end = max(end, ordered[last - 1].ready_s) + cluster.all_reduce_s(size)
            best = min(best, end)
    return best


@given(gradient_lists, clusters)
@settings(max_examples=300, deadline=None)
def test_no_buckets_end_sooner(gradients: list[Gradient], cluster: Cluster) -> None:
    plan = plan_buckets(gradients, cluster)
    assert plan.end_s[-1] == pytest.approx(earliest_end(gradients, cluster))
    assert plan.exposed_s == plan.end_s[-1] - max(gradient.ready_s for gradient in gradients)


@given(gradient_lists, clusters, st.none() | st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_every_gradient_is_in_one_bucket_and_none_starts_too_soon(
    gradients: list[Gradient], cluster: Cluster, cap: int | None
) -> None:
    plan = plan_buckets(gradients, cluster, bucket_cap_bytes=cap)
    ready = {gradient.name: gradient.ready_s for gradient in gradients}
    assert sorted(name for bucket in plan.buckets for name in bucket) == sorted(ready)
    for bucket, start in zip(plan.buckets, plan.start_s, strict=True):
        assert start >= max(ready[name] for name in bucket)
    assert all(start >= end for start, end in zip(plan.start_s[1:], plan.end_s, strict=False))
    assert BucketPlan.from_json(plan.to_json()) == plan


@given(gradient_lists, st.integers(1, 20), st.integers(1, 20))
@settings(deadline=None)
def test_a_capped_bucket_is_closed_by_the_gradient_that_fills_it(
    gradients: list[Gradient], cap: int, first: int
) -> None:
    plan = plan_buckets(gradients, Cluster(2), bucket_cap_bytes=cap, first_bucket_cap_bytes=first)
    size = {gradient.name: gradient.size_bytes for gradient in gradients}
    for index, bucket in enumerate(plan.buckets):
        limit = cap if index else first
        assert sum(size[name] for name in bucket[:-1]) < limit
        assert plan.bucket_bytes[index] >= limit or index == len(plan.buckets) - 1


def test_without_latency_each_gradient_goes_at_once() -> None:
    gradients = [Gradient(str(index), 4, float(index)) for index in range(4)]
    assert len(plan_buckets(gradients, Cluster(2, 8.0)).buckets) == 4


def test_with_much_latency_all_go_together() -> None:
    gradients = [Gradient(str(index), 4, float(index)) for index in range(4)]
    assert len(plan_buckets(gradients, Cluster(2, 8.0, 100.0)).buckets) == 1


@pytest.mark.parametrize(
    ("gradients", "options", "message"),
    [
        ([], {}, "the number of gradients is 0"),
        (
            [Gradient("a", 1, 0.0)],
            {"bucket_cap_bytes": 0},
            "bucket_cap_bytes is 0: give a whole number of at least 1",
        ),
        ([Gradient("a", 1, 0.0)], {"first_bucket_cap_bytes": 1}, "first_bucket_cap_bytes is given without"),
        ([Gradient("a", 1, 0.0)] * 2, {}, "two gradients have the same name"),
    ],
)
def test_what_makes_no_sense_is_refused(
    gradients: list[Gradient], options: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_buckets(gradients, Cluster(2), **options)


def test_a_gradient_of_negative_size_is_refused() -> None:
    with pytest.raises(PlanError, match="size_bytes of gradient 'a' is -1"):
        Gradient("a", -1, 0.0)
