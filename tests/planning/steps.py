"""Random steps for properties: schedules of every kind, uneven costs, unequal ranks, shared links."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from partita.planning import (
    Cluster,
    LinkLevel,
    PairLink,
    Schedule,
    StageCost,
    get_schedule,
    lower,
    schedule_names,
    with_reduce_grad,
    with_unshard,
)

sizes = st.integers(0, 5)


@dataclass(frozen=True)
class Step:
    """What `simulate` takes."""

    schedule: Schedule
    costs: tuple[StageCost, ...]
    cluster: Cluster
    edges: tuple[tuple[int, int], ...]


@st.composite
def steps(draw: st.DrawFn, least: int = 0) -> Step:
    """A step in which no pass takes less than `least` seconds; all times are multiples of 1/8."""
    ranks, name = draw(st.integers(1, 4)), draw(st.sampled_from(schedule_names()))
    schedule = get_schedule(name)(2 * ranks, 2 * ranks + draw(st.integers(0, 3)), ranks)
    edges = [(stage, stage + 1) for stage in range(schedule.stages - 1)]
    if schedule.stages > 2 and draw(st.booleans()):
        edges.append((0, schedule.stages - 1))
    if draw(st.booleans()):
        schedule = _with_collectives(schedule, draw(st.integers(1, 3)))
    if draw(st.booleans()):
        schedule = lower(schedule, edges)
    costs = tuple(draw(_costs(least)) for _ in range(schedule.stages))
    if schedule.stages > 1 and draw(st.booleans()):
        sent = tuple((stage, draw(sizes)) for stage in {0, draw(st.integers(0, schedule.stages - 2))})
        costs = (*costs[:-1], replace(costs[-1], tied_gradients=sent))
    return Step(schedule, costs, draw(clusters(schedule.ranks)), tuple(edges))


def _with_collectives(schedule: Schedule, most: int) -> Schedule:
    rows = tuple(with_reduce_grad(with_unshard(row, most), schedule.microbatches) for row in schedule.rows)
    return replace(schedule, rows=rows)


@st.composite
def _costs(draw: st.DrawFn, least: int) -> StageCost:
    seconds = st.integers(least, 6).map(float)
    kept, again = draw(sizes), draw(sizes)
    return StageCost(
        draw(seconds),
        draw(seconds) + draw(seconds),
        *draw(st.one_of(st.just((None, None)), st.tuples(seconds, seconds))),
        send_bytes=draw(sizes),
        send_grad_bytes=draw(st.none() | sizes),
        activation_bytes=kept,
        static_bytes=draw(sizes),
        weight_activation_bytes=draw(st.none() | st.integers(0, kept + again)),
        overlap_s=draw(st.none() | seconds),
        forward_workspace_bytes=draw(sizes),
        backward_workspace_bytes=draw(sizes),
        recompute_s=draw(st.integers(0, 3).map(float)),
        recompute_bytes=again,
        unshard_s=draw(st.integers(0, 5).map(float)),
        reduce_grad_s=draw(st.integers(0, 5).map(float)),
    )


@st.composite
def clusters(draw: st.DrawFn, ranks: int) -> Cluster:
    """Of equal or unequal ranks, with links of their own, ports that are shared, or a bus."""
    bandwidths, latencies = st.sampled_from([0.5, 1.0, 4.0, float("inf")]), st.integers(0, 4).map(float)
    speeds = draw(st.none() | st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * ranks))
    kind = draw(st.sampled_from(["alike", "levels", "pairs"]))
    if kind == "alike":
        return Cluster(ranks, draw(bandwidths), draw(latencies), speeds=speeds)
    if kind == "levels":
        counts = st.sampled_from([None, 1, 2])
        near = LinkLevel(draw(st.integers(1, 2)), draw(bandwidths), draw(latencies), draw(counts))
        far = LinkLevel(None, draw(bandwidths), draw(latencies), draw(counts))
        return Cluster(ranks, speeds=speeds, levels=(near, far))
    names = st.sampled_from(["", "bus", "other bus"])
    pairs = [
        PairLink(sender, receiver, draw(bandwidths), draw(latencies), draw(names))
        for sender in range(ranks)
        for receiver in range(ranks)
        if sender != receiver and draw(st.booleans())
    ]
    return Cluster(ranks, draw(bandwidths), draw(latencies), speeds=speeds, pairs=tuple(pairs))
