from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

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


def all_ends(gradients: list[Gradient], cluster: Cluster) -> Iterator[tuple[float, int]]:
    """For each way to cut the gradients into buckets, when it ends, and how many buckets it has."""
    ordered = sorted(gradients, key=lambda gradient: gradient.ready_s)
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            yield end_of(ordered, (*cuts, len(ordered)), cluster), count + 1


def end_of(ordered: list[Gradient], ends: tuple[int, ...], cluster: Cluster) -> float:
    end = 0.0
    for first, last in pairwise((0, *ends)):
        size = sum(gradient.size_bytes for gradient in ordered[first:last])
        end = max(end, ordered[last - 1].ready_s) + cluster.all_reduce_s(size)
    return end


def stops(plan: BucketPlan) -> tuple[int, ...]:
    return tuple(accumulate(len(bucket) for bucket in plan.buckets))


def slower(cluster: Cluster, factor: float) -> Cluster:
    return replace(
        cluster,
        bandwidth_bytes_per_s=cluster.bandwidth_bytes_per_s / factor,
        latency_s=cluster.latency_s * factor,
    )


@given(gradient_lists, clusters)
@settings(max_examples=300, deadline=None)
def test_no_buckets_end_sooner_and_no_fewer_end_as_soon(gradients: list[Gradient], cluster: Cluster) -> None:
    plan = plan_buckets(gradients, cluster)
    all_plans = list(all_ends(gradients, cluster))
    best = min(end for end, _ in all_plans)
    assert plan.end_s[-1] == pytest.approx(best)
    assert len(plan.buckets) == min(count for end, count in all_plans if end == pytest.approx(best))
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


def test_without_latency_on_slow_links_each_gradient_goes_at_once() -> None:
    gradients = [Gradient(str(index), 4, float(index)) for index in range(4)]
    assert len(plan_buckets(gradients, Cluster(2, 4.0)).buckets) == 4


def test_on_fast_links_a_bucket_waits_as_long_as_that_costs_nothing() -> None:
    gradients = [Gradient(str(index), 4, float(index)) for index in range(4)]
    plan = plan_buckets(gradients, Cluster(2, 8.0))
    assert plan.buckets == (("0",), ("1", "2"), ("3",))
    assert plan.exposed_s == 0.5


@pytest.mark.parametrize("relation", [0.2, 0.5, 0.9, 1.0, 1.5, 3.0])
def test_with_a_margin_buckets_are_good_on_faster_and_slower_links(relation: float) -> None:
    gradients = [Gradient(str(index), 1000, (index + 1) / 200) for index in range(200)]
    cluster = Cluster(2, sum(gradient.size_bytes for gradient in gradients) / relation, 1e-4)
    found = plan_buckets(gradients, cluster, margin=0.25, bucket_s=1e-3)
    assert len(found.buckets) <= 40
    for factor in (0.8, 1.0, 1.25):
        links = slower(cluster, factor)
        assert end_of(gradients, stops(found), links) <= 1.03 * plan_buckets(gradients, links).end_s[-1]


def test_without_a_margin_a_better_link_may_stand_idle() -> None:
    gradients = [Gradient(str(index), 1000, (index + 1) / 200) for index in range(200)]
    cluster = Cluster(2, 200_000 / 1.5, 1e-4)
    found, exact = plan_buckets(gradients, cluster, margin=0.25), plan_buckets(gradients, cluster)
    fast = slower(cluster, 0.8)
    best = plan_buckets(gradients, fast).end_s[-1]
    assert end_of(gradients, stops(exact), fast) > 1.05 * best
    assert end_of(gradients, stops(found), fast) < 1.01 * best


@given(gradient_lists, clusters, st.sampled_from([0.25, 1.0]), st.sampled_from([0.0, 0.5]))
@settings(max_examples=100, deadline=None)
def test_with_a_margin_buckets_lose_no_more_at_their_worst(
    gradients: list[Gradient], cluster: Cluster, margin: float, bucket_s: float
) -> None:
    ordered = sorted(gradients, key=lambda gradient: gradient.ready_s)

    def worst(plan: BucketPlan) -> float:
        late = []
        for factor in (1 / (1 + margin), 1.0, 1 + margin):
            links = slower(cluster, factor)
            late.append(end_of(ordered, stops(plan), links) - plan_buckets(gradients, links).end_s[-1])
        alone = cluster.all_reduce_s(max(plan.bucket_bytes)) / 10
        return max(late) + bucket_s * len(plan.buckets) + alone

    found = plan_buckets(gradients, cluster, margin=margin, bucket_s=bucket_s)
    assert worst(found) <= worst(plan_buckets(gradients, cluster)) + 1e-9
    assert found.end_s[-1] == pytest.approx(end_of(ordered, stops(found), cluster))


def test_with_a_margin_several_buckets_are_under_way_on_slow_links() -> None:
    gradients = [Gradient(str(index), 1000, (index + 1) / 200) for index in range(200)]
    cluster = Cluster(2, 200_000 / 4, 1e-4)
    assert max(plan_buckets(gradients, cluster).bucket_bytes) > 100_000
    found = plan_buckets(gradients, cluster, margin=0.25, bucket_s=1e-3)
    assert max(found.bucket_bytes) < 20_000
    quick = plan_buckets(gradients, Cluster(2, 200_000 / 2e-3, 1e-6), margin=0.25, bucket_s=1e-3)
    assert len(quick.buckets) <= 2  # more would cost more than they save


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
        ([Gradient("a", 1, 0.0)], {"bucket_s": -1.0}, "bucket_s is -1.0"),
        ([Gradient("a", 1, 0.0)], {"margin": -0.5}, "margin is -0.5: give a finite number, 0 or more"),
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
