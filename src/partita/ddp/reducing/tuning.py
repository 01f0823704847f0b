"""Buckets from measurements: when gradients are ready, and how fast the links are."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from partita.errors import PlanError
from partita.planning import BucketPlan, Cluster, Gradient, plan_buckets
from partita.runtime import Comm

if TYPE_CHECKING:
    from partita.ddp.reducing.reducer import Reducer

__all__ = ["MARGIN", "measure_links", "measure_links_of", "plan_from_samples", "tune_itself"]

_LOG = logging.getLogger("partita.ddp")
MARGIN = 0.25
"""By which part an all-reduce beside a backward pass may take longer, or shorter, than one alone."""

_SMALL_BYTES = 2**12
_LARGE_BYTES = 2**22
_PASSES = 7
"""The median is to be that of a pass without compiling: graphs are cut anew in the first of them, and may be
in the second.
"""
_BUCKET_S = 5e-4  # of computing, for a cut and a start: as seen on CPUs, with pieces by Inductor


def measure_links(comm: Comm, *, rounds: int = 5, device: torch.device | str = "cpu") -> Cluster:
    """Measure latency and bandwidth of the links between all ranks, from all-reduces of two sizes.

    Collective.

    Returns:
        The cluster whose model, ``2 (r - 1)`` steps of an r-th of the bytes, takes the times that were
        measured; the same on every rank.
    """
    if comm.size == 1:
        return Cluster(ranks=1)
    small_s, large_s = (_all_reduce_s(comm, size, rounds, device) for size in (_SMALL_BYTES, _LARGE_BYTES))
    steps = 2 * (comm.size - 1)
    # a small message can take longer than a large one on a busy machine; then the link is as good as infinite
    slope_s = max(large_s - small_s, 1e-9) / (_LARGE_BYTES - _SMALL_BYTES)
    bandwidth = steps / comm.size / slope_s
    latency_s = max(0.0, small_s / steps - _SMALL_BYTES / comm.size / bandwidth)
    return Cluster(comm.size, bandwidth, latency_s)


def _all_reduce_s(comm: Comm, size_bytes: int, repeats: int, device: torch.device | str) -> float:
    """The median of the slowest rank's times."""
    tensor = torch.zeros(size_bytes // 4, device=device)
    members = tuple(range(comm.size))
    taken = []
    for _ in range(repeats + 1):
        comm.barrier()
        started = time.monotonic()
        comm.all_reduce(tensor, members).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        taken.append(time.monotonic() - started)
    everywhere: list[list[float]] = comm.all_gather_object(taken[1:])
    return statistics.median(max(of_round) for of_round in zip(*everywhere, strict=True))


def measure_links_of(reducer: Reducer) -> Cluster:
    """Measure the links between the devices that most bytes of the gradients are on. Collective."""
    bytes_on: dict[torch.device, int] = {}
    for parameter in reducer.parameters:
        bytes_on[parameter.device] = bytes_on.get(parameter.device, 0) + parameter.nbytes
    return measure_links(reducer.comm, device=max(bytes_on, key=bytes_on.__getitem__))


def tune_itself(reducer: Reducer) -> None:
    """Measure some passes, but not the first ones, and change to the best buckets for them.

    It is called after each synchronised pass. Collective at the end of the last one.
    """
    if not reducer.measuring:
        if reducer.is_steady:
            reducer.measure(on=True)
        return
    if len(reducer.samples) < _PASSES:
        return
    reducer.pass_ended = None
    reducer.measure(on=False)
    links = measure_links_of(reducer)
    plan = plan_from_samples(reducer, links, margin=MARGIN)
    reducer.use_plan(plan)
    _LOG.info("%d buckets, planned for %s", len(plan.buckets), links)


def plan_from_samples(reducer: Reducer, cluster: Cluster, *, margin: float) -> BucketPlan:
    """Return the best buckets for what ``reducer`` has measured; the same on every rank. Collective.

    A gradient counts as ready when the slowest rank has it; one that no rank has seen, as the last. Gradients
    of other data types or devices get buckets of their own.

    Raises:
        PlanError: nothing has been measured.
    """
    medians = {
        name: statistics.median(times)
        for name in reducer.names
        if (times := [sample[name] for sample in reducer.samples if name in sample])
    }
    everywhere: list[dict[str, float]] = reducer.comm.all_gather_object(medians)
    if not any(everywhere):
        raise PlanError(
            "there is no measurement of any gradient: take at least four synchronised steps in "
            "`with module.replication.measuring():`"
        )
    slowest_s: dict[str, float] = {}
    for of_rank in everywhere:
        for name, ready_s in of_rank.items():
            slowest_s[name] = max(ready_s, slowest_s.get(name, 0.0))
    last_s = max(slowest_s.values())
    # A sparse gradient has a bucket of its own in any plan.
    sparse = {name for bucket in reducer.buckets if bucket.is_sparse for name in bucket.names}
    kinds: dict[tuple[torch.dtype, torch.device], list[Gradient]] = {}
    for name, parameter in zip(reducer.names, reducer.parameters, strict=True):
        if name in sparse:
            continue
        gradient = Gradient(name, parameter.nbytes, slowest_s.get(name, last_s))
        kinds.setdefault((parameter.dtype, parameter.device), []).append(gradient)
    plans = [
        plan_buckets(gradients, cluster, margin=margin, bucket_s=_BUCKET_S) for gradients in kinds.values()
    ]
    return plans[0] if len(plans) == 1 else _merged(plans, kinds.values(), cluster)


def _merged(plans: list[BucketPlan], kinds: Iterable[list[Gradient]], cluster: Cluster) -> BucketPlan:
    """The buckets of several plans, one after another as they get ready."""
    ready_s = {gradient.name: gradient.ready_s for gradients in kinds for gradient in gradients}
    buckets = sorted(
        (max(ready_s[name] for name in bucket), bucket, size)
        for plan in plans
        for bucket, size in zip(plan.buckets, plan.bucket_bytes, strict=True)
    )
    starts, ends, free_s = [], [], 0.0
    for ready, _, size in buckets:
        starts.append(max(free_s, ready))
        free_s = starts[-1] + cluster.all_reduce_s(size)
        ends.append(free_s)
    return BucketPlan(
        tuple(bucket for _, bucket, _ in buckets),
        tuple(size for _, _, size in buckets),
        tuple(starts),
        tuple(ends),
        free_s - max(ready_s.values(), default=0.0),
    )
