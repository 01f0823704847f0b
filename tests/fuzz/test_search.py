"""What a search is held to, over many models, clusters and limits: `make fuzz` runs it."""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import replace

import pytest
from tests.planning.profiles import (
    all_placements,
    all_stages,
    best_named_s,
    random_profile,
    small_profile,
)

from partita.errors import InfeasiblePlan
from partita.planning import optimal_schedule, schedule_of, search, simulate, validate
from partita.planning.generators.making.problem import scheduling_problem
from partita.planning.searching.orders.clock import make_schedule
from partita.planning.searching.orders.improve import Budget, lower_bound_s
from partita.planning.searching.orders.list_schedule import best_order

PROFILES = 300
SMALL = 100
UNEQUAL = 200


def tell(text: str) -> None:
    """Seen with ``-s``, as `make fuzz` runs it."""
    sys.stdout.write(f"{text}\n")


pytestmark = [pytest.mark.slow, pytest.mark.dear]


def test_never_worse_than_the_best_named_schedule_and_better_on_uneven_models() -> None:
    gains = []
    for seed in range(PROFILES):
        profile = random_profile(seed)
        named_s = best_named_s(profile)
        try:
            best = search(profile.costs, profile.cluster, microbatches=profile.microbatches)[0]
        except InfeasiblePlan:
            assert named_s == math.inf, seed
            continue
        validate(schedule_of(best.plan))
        result = simulate(schedule_of(best.plan), best.plan)
        assert result.makespan_s == pytest.approx(best.makespan_s)
        limit = profile.cluster.memory_bytes
        assert limit is None or max(result.peak_bytes) <= limit, seed
        assert result.makespan_s <= named_s * (1 + 1e-9), seed
        if profile.is_uneven and named_s < math.inf:
            gains.append(named_s / result.makespan_s - 1)
    tell(f"uneven: {statistics.median(gains):.3f} faster in the median of {len(gains)}")
    assert statistics.median(gains) >= 0.05


def gap(seed: int, speeds: tuple[float, ...] | None) -> float:
    """How much longer the step takes than with the best cuts, placement and order, by solver and bound."""
    profile = small_profile(seed, speeds)
    cluster, microbatches = profile.cluster, profile.microbatches
    found_s = best_s = search(profile.costs, cluster, microbatches=microbatches)[0].makespan_s
    cases = [
        (scheduling_problem(stages, placement, microbatches, cluster), placement, stages)
        for placement in all_placements(cluster.ranks)
        for stages in all_stages(profile, len(placement))
    ]
    for problem, placement, stages in sorted(cases, key=lambda case: lower_bound_s(case[0])):
        if lower_bound_s(problem) >= best_s * (1 - 1e-6):
            break
        order = best_order(problem, Budget(20_000))
        assert order is not None
        optimum = optimal_schedule(
            stages,
            microbatches,
            placement=placement,
            cluster=cluster,
            start=make_schedule("start", placement, microbatches, order.rows),
            time_limit_s=3.0,
        )
        best_s = min(best_s, optimum.makespan_s)
    return found_s / best_s - 1


def test_near_the_optimum_of_small_cases() -> None:
    gaps = [gap(seed, None) for seed in range(SMALL)]
    tell(
        f"equal ranks: {statistics.median(gaps):.4f} over the optimum in the median, {max(gaps):.4f} at most"
    )
    assert statistics.median(gaps) <= 0.02
    assert max(gaps) <= 0.05


def test_unequal_ranks() -> None:
    gaps, gains = [], []
    for seed in range(UNEQUAL):
        speeds = (1.0, 3.0) if seed % 4 else (3.0, 1.0, 1.0)
        gaps.append(gap(seed, speeds))
        profile = small_profile(seed, speeds)
        best = search(profile.costs, profile.cluster, microbatches=profile.microbatches)[0]
        as_equal = replace(profile.cluster, speeds=None)
        plan = search(profile.costs, as_equal, microbatches=profile.microbatches)[0].plan
        gains.append(simulate(schedule_of(plan), plan, profile.cluster).makespan_s / best.makespan_s - 1)
    tell(
        f"speeds 1:3: {statistics.median(gains):.3f} faster than planned for equal ranks, "
        f"{max(gaps):.4f} over the optimum at most"
    )
    assert statistics.median(gains) >= 0.2
    assert max(gaps) <= 0.02
