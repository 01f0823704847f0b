"""Models, clusters and limits drawn by a seed, for what a search is held to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from random import Random

from partita.errors import PlanError
from partita.planning import (
    Cluster,
    CostModel,
    StageCost,
    Unit,
    get_schedule,
    loop_placement,
    plan_stages,
    recomputed_cost,
    schedule_names,
    schedule_of,
    simulate,
    stage_costs,
    v_placement,
)


@dataclass(frozen=True)
class Profile:
    """A model, the cluster for it and the number of microbatches."""

    costs: CostModel
    cluster: Cluster
    microbatches: int
    is_uneven: bool


def random_profile(seed: int, most_ranks: int = 8) -> Profile:
    """Two thirds with uneven units and W unlike I, half with a limit of memory, most with slow links."""
    random = Random(seed)
    is_uneven = seed % 3 != 0
    ranks = random.choice([ranks for ranks in (2, 3, 4, 6, 8) if ranks <= most_ranks])
    count = ranks * random.choice((2, 3, 4))
    microbatches = ranks * random.choice((1, 2, 3))
    units = tuple(_unit(random, index, is_uneven) for index in range(count))
    costs = CostModel(units, tuple(random.randint(1, 4) for _ in units[1:]))
    cluster = Cluster(ranks, random.choice((math.inf, 20.0, 5.0)), random.choice((0.0, 0.05, 0.3)))
    if seed % 4 >= 2:
        plan = plan_stages(costs, ranks, cluster=cluster, microbatches=microbatches)
        peak = max(simulate(schedule_of(plan), plan).peak_bytes)
        cluster = replace(cluster, memory_bytes=int(peak * random.choice((0.6, 0.8, 1.0, 1.3))))
    return Profile(costs, cluster, microbatches, is_uneven)


def _unit(random: Random, index: int, is_uneven: bool) -> Unit:
    forward_s = random.lognormvariate(0.0, 0.6) if is_uneven else 1.0
    input_s = forward_s * (random.uniform(0.7, 1.3) if is_uneven else 1.0)
    weight_s = forward_s * (random.uniform(0.2, 1.2) if is_uneven else 1.0)
    kept = random.randint(1, 8) if is_uneven else 4
    return Unit(
        f"u{index}",
        forward_s,
        (input_s + weight_s) * random.choice((1.0, 1.0, 0.95)),
        parameter_bytes=random.randint(0, 3),
        activation_bytes=kept,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        weight_activation_bytes=random.randint(0, kept),
    )


def best_named_s(profile: Profile) -> float:
    """Seconds of the best named schedule that fits, as `plan_stages` cuts for it; infinite if none does."""
    cluster, microbatches = profile.cluster, profile.microbatches
    best = math.inf
    for kind in map(get_schedule, schedule_names()):
        for stages in (cluster.ranks, 2 * cluster.ranks) if kind.trains else ():
            try:
                plan = plan_stages(
                    profile.costs, stages, cluster=cluster, schedule=kind.name, microbatches=microbatches
                )
                if plan.ranks < cluster.ranks:
                    continue
                costs = stage_costs(plan)
                schedule = kind(stages, microbatches, plan.ranks, costs=costs, cluster=cluster)
                result = simulate(schedule, costs, cluster)
            except PlanError:
                continue
            if cluster.memory_bytes is None or max(result.peak_bytes) <= cluster.memory_bytes:
                best = min(best, result.makespan_s)
    return best


def small_profile(seed: int, speeds: tuple[float, ...] | None = None) -> Profile:
    """So few passes that all cuts can be tried, with a proof of the best order for each."""
    random = Random(seed)
    ranks = 2 if speeds is None else len(speeds)
    units = tuple(_unit(random, index, True) for index in range(random.randint(2 * ranks, 2 * ranks + 1)))
    costs = CostModel(units, tuple(random.randint(1, 4) for _ in units[1:]))
    cluster = Cluster(ranks, random.choice((math.inf, 20.0, 5.0)), random.choice((0.0, 0.1)), speeds=speeds)
    return Profile(costs, cluster, random.randint(2, 3), True)


def all_stages(profile: Profile, stages: int) -> list[list[StageCost]]:
    """The costs of the stages of every cut into so many."""
    count = len(profile.costs.units)
    return [
        [
            recomputed_cost(profile.costs, start, end - 1)
            for start, end in zip((0, *cuts), (*cuts, count), strict=True)
        ]
        for cuts in combinations(range(1, count), stages - 1)
    ]


def all_placements(ranks: int) -> list[tuple[int, ...]]:
    """Round the ranks, once and twice, and in a V, with the ranks in every order."""
    own = (loop_placement(ranks, ranks), loop_placement(2 * ranks, ranks), v_placement(2 * ranks, ranks))
    return [tuple(order[place] for place in one) for one in own for order in permutations(range(ranks))]
