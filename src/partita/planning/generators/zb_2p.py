"""ZB-2p: the automatic zero-bubble schedule, made for the times of F, I, W and of messages.

With F = I = W and no time for messages, 4 ranks and 8 microbatches::

    0   F0 F1 F2 F3 F4 F5 F6 I0 F7 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 I6 W5 I7 W6 W7
    1    . F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 F7 I3 W0 I4 W1 I5 W2 I6 W3 I7 W4 W5 W6 W7
    2    .  . F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 F7 I5 W0 I6 W1 I7 W2 W3 W4 W5 W6 W7
    3    .  .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 F7 I7 W0 W1 W2 W3 W4 W5 W6 W7

(P. Qi et al., "Zero bubble pipeline parallelism", 2023, section 3.1, of which this has the aim, the limit of
2p microbatches and the choice of the best among heuristic schedules; the heuristics are partita's own.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from partita.errors import ScheduleError
from partita.garbage import no_garbage_collection
from partita.planning.costs.stage_cost import StageCost
from partita.planning.generators.interleaved_zero_bubble import interleaved_zero_bubble
from partita.planning.generators.making.arguments import place
from partita.planning.generators.making.list_scheduler import Outcome, Rule, Rules, least_capacity
from partita.planning.generators.making.problem import Problem, scheduling_problem
from partita.planning.generators.making.ticks import laid_out
from partita.planning.generators.zb_h1 import zb_h1
from partita.planning.generators.zb_h2 import zb_h2
from partita.planning.hardware.cluster import Cluster
from partita.planning.schedules.schedule import Schedule
from partita.planning.simulating.summary import step_summary

__all__ = ["zb_2p"]

_MOST_PASSES = 600_000
"""What all heuristics together may schedule; large pipelines try fewer of them."""
_MOST_RULES = 48
_EQUAL = StageCost(1.0, 2.0, activation_bytes=1, weight_activation_bytes=1)


def zb_2p(
    stages: int,
    microbatches: int,
    ranks: int | None = None,
    placement: Sequence[int] | None = None,
    *,
    costs: Sequence[StageCost] | None = None,
    cluster: Cluster | None = None,
    memory_bytes: int | None = None,
) -> Schedule:
    """The best of many schedules in which W fills what would be idle, by the longest span of a rank.

    ZB-H2 has no bubble where F, I and W take equally long and messages take no time. This one is made for the
    times that are given. A rank runs ahead by so many forward passes as it takes until its first gradient
    comes back, and keeps as many W for the end as the ranks before it need to get theirs.

    Args:
        stages: how many stages there are.
        microbatches: how many a step has.
        ranks: the stages go round so many ranks; one rank a stage where it is not given.
        placement: the rank of each stage, in place of `ranks`.
        costs: one a stage; where they are not given, F, I and W take equally long, I frees nothing, and a
            stage keeps one byte of a microbatch, so that `memory_bytes` is a number of microbatches.
        cluster: the links and the memory; links that take no time where it is not given.
        memory_bytes: what each rank may hold, `StageCost.static_bytes` included; what the cluster says of
            it where it is not given. Without either, a rank holds the activations of at most twice as many
            microbatches as there are ranks. Where the costs do not say what I leaves to W
            (`StageCost.weight_activation_bytes`), only those between F and I count, and W's come on top.

    Raises:
        ScheduleError: a number below 1, a rank without a stage, not one cost a stage, a cluster with fewer
            ranks, or too little memory for one microbatch.
    """
    stage_ranks = place("ZB2p", stages, microbatches, ranks, placement)
    if costs is None:
        costs = (_EQUAL,) * stages
    if len(costs) != stages:
        raise ScheduleError(f"ZB2p with {len(costs)} costs for {stages} stages: give one a stage")
    if cluster is not None and cluster.ranks <= max(stage_ranks):
        raise ScheduleError(
            f"ZB2p on {max(stage_ranks) + 1} ranks, with a cluster of {cluster.ranks}: give it as many"
        )
    with no_garbage_collection():
        return _schedule(stage_ranks, microbatches, tuple(costs), cluster, memory_bytes)


@lru_cache(maxsize=4)
def _schedule(
    stage_ranks: tuple[int, ...],
    microbatches: int,
    costs: tuple[StageCost, ...],
    cluster: Cluster | None,
    memory_bytes: int | None,
) -> Schedule:
    best = _best(_problem(stage_ranks, microbatches, costs, cluster, memory_bytes))
    queues, span_s = [[actions] for actions in best.actions()], best.span_s
    limits = [memory_bytes] * (max(stage_ranks) + 1)
    if memory_bytes is None and cluster is not None:
        limits = [cluster.memory(rank) for rank in range(len(limits))]
    for schedule in _handmade(stage_ranks, microbatches):
        result = step_summary(schedule, costs, cluster)
        fits = all(
            limit is None or peak <= limit for peak, limit in zip(result.peak_bytes, limits, strict=True)
        )
        if fits and result.span_s < span_s * (1 - 1e-9):
            queues, span_s = [[list(schedule.actions(rank))] for rank in range(schedule.ranks)], result.span_s
    return Schedule("ZB2p", stage_ranks, microbatches, laid_out(queues, len(stage_ranks), "ZB2p"))


@lru_cache(maxsize=1)
def _handmade(stage_ranks: tuple[int, ...], microbatches: int) -> tuple[Schedule, ...]:
    """The schedules for equal costs, which a search asks for with one cut after the other."""
    return tuple(
        handmade(len(stage_ranks), microbatches, placement=stage_ranks)
        for handmade in (zb_h1, zb_h2, interleaved_zero_bubble)
    )


def _problem(
    stage_ranks: tuple[int, ...],
    microbatches: int,
    costs: tuple[StageCost, ...],
    cluster: Cluster | None,
    memory_bytes: int | None,
) -> Problem:
    stages, ranks = len(stage_ranks), max(stage_ranks) + 1
    cluster = Cluster(ranks) if cluster is None else cluster
    if memory_bytes is not None:
        cluster = replace(cluster, memory_bytes=memory_bytes, memories=None)
    problem = scheduling_problem(costs, stage_ranks, microbatches, cluster)
    least = least_capacity(problem)
    if min(problem.capacity) < math.inf:
        _check_capacity(problem, least, [cluster.memory(rank) for rank in range(ranks)])
        return problem
    if all(cost.activation_bytes and cost.weight_activation_bytes is not None for cost in costs):
        once = [0] * ranks
        for rank, cost in zip(stage_ranks, costs, strict=True):
            once[rank] += cost.activation_bytes
        twice = tuple(max(2 * ranks * size, needed) for size, needed in zip(once, least, strict=True))
        return replace(problem, capacity=twice)
    # Counted in passes, and without what W keeps, which is the smaller part.
    nothing = (0,) * stages
    return replace(
        problem,
        kept=(1,) * stages,
        kept_for_weight=nothing,
        capacity=(2 * stages,) * ranks,
        forward_extra=nothing,
        input_extra=nothing,
        backward_extra=nothing,
        weight_extra=nothing,
    )


def _check_capacity(problem: Problem, least: Sequence[float], limits: Sequence[int | None]) -> None:
    """Raise ScheduleError where a rank has no memory for one microbatch."""
    for rank, (limit, capacity, needed) in enumerate(zip(limits, problem.capacity, least, strict=True)):
        if limit is not None and needed > capacity:
            always = limit - capacity
            raise ScheduleError(
                f"ZB2p with {limit} bytes a rank: rank {rank} takes {always:.0f} bytes all the time "
                f"and {needed:.0f} for a microbatch; give at least {always + needed:.0f}"
            )


def _best(problem: Problem) -> Outcome:
    """Try limits of idle time from far too large to none, closer around the best, then with deadlines."""
    left = min(max(_MOST_PASSES // (3 * problem.stages * problem.microbatches), 6), _MOST_RULES)
    bound_s = _bound_s(problem)
    longest_s = max(problem.forward_s)
    coarse_s = [2 * longest_s * 0.62**step for step in range(0, 10, 1 if left > 20 else 2)]
    rules = Rules(problem)
    first = rules.run(Rule(coarse_s[0]))
    if first is None:
        raise AssertionError("unreachable: nothing takes for ever")
    best_s, best = coarse_s[0], first

    def attempt(*chosen: Rule) -> None:
        nonlocal best_s, best, left
        for rule in chosen:
            if left and best.span_s > bound_s * (1 + 1e-9):
                left -= 1
                outcome = rules.run(rule, best.span_s)
                if outcome is not None and (outcome.span_s, outcome.end_s) < (best.span_s, best.end_s):
                    best_s, best = rule.idle_s, outcome

    attempt(*map(Rule, coarse_s[1:]))
    for step in (1.25, 1.12, 1.06, 1.03):
        attempt(Rule(best_s * step), Rule(best_s / step))
    for part in (0.02, 0.5):
        target_s = bound_s + part * (best.span_s - bound_s)
        attempt(*(Rule(idle_s, target_s) for idle_s in coarse_s))
    return best


def _bound_s(problem: Problem) -> float:
    """A lower bound of the longest span: the busiest rank's work, or the chain that ends on the first."""
    last = problem.stages - 1
    chain_s = problem.start_s()[last]
    chain_s += problem.microbatches * (problem.forward_s[last] + problem.input_s[last])
    chain_s += sum(problem.input_s[:last]) + sum(problem.up_s) + problem.weight_s[0]
    return max(*problem.work_s(), chain_s)
