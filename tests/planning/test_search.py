from __future__ import annotations

import pytest

from partita.errors import InfeasiblePlan, PlanError, ScheduleError
from partita.planning import Cluster, CostModel, StageCost, Unit, get_schedule, search, simulate

UNITS = tuple(Unit(f"u{index}", 1.0, 2.0, parameter_bytes=10, activation_bytes=5) for index in range(8))
COSTS = CostModel(UNITS, (4,) * 7)


def test_the_fastest_comes_first() -> None:
    found = search(COSTS, Cluster(4))
    times = [candidate.makespan_s for candidate in found]
    assert times == sorted(times)
    assert {candidate.plan.schedule for candidate in found} >= {"GPipe", "1F1B", "ZBVZeroBubble"}


def test_a_candidate_is_what_its_plan_simulates_to() -> None:
    for candidate in search(COSTS, Cluster(2, 8.0, 0.5)):
        plan = candidate.plan
        result = simulate(get_schedule(plan.schedule)(len(plan.stages), plan.microbatches, plan.ranks), plan)
        assert (candidate.makespan_s, candidate.bubble, candidate.peak_bytes) == (
            result.makespan_s,
            result.bubble,
            result.peak_bytes,
        )


def test_every_candidate_fits_the_memory_and_uses_every_rank() -> None:
    cluster = Cluster(4, memory_bytes=140)
    found = search(COSTS, cluster)
    assert all(max(candidate.peak_bytes) <= 140 for candidate in found)
    assert all(candidate.plan.ranks == 4 for candidate in found)
    assert "GPipe" not in {candidate.plan.schedule for candidate in found}


def test_nothing_that_can_be_done_gives_every_reason() -> None:
    with pytest.raises(
        InfeasiblePlan, match=r"nothing that was tried can be done. GPipe with 2 stages: no cut into 2 stages"
    ):
        search(COSTS, Cluster(2, memory_bytes=1), schedules=["gpipe"])


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match="there is no schedule 'x'"):
        search(COSTS, Cluster(2), schedules=["x"])


def test_a_number_out_of_range_is_refused() -> None:
    with pytest.raises(PlanError, match="a number in stages_per_rank is 0"):
        search(COSTS, Cluster(2), stages_per_rank=[0])


@pytest.mark.parametrize(("sixteenths", "bubble"), [(10, 0.0813), (8, 0.1233)])
def test_a_budget_of_memory_costs_no_more_than_in_the_paper(sixteenths: int, bubble: float) -> None:
    """1F1B with fewer microbatches in flight had 0.316 and 0.486 here."""
    units = tuple(Unit(f"block{index}", 1.0, 2.0, activation_bytes=2) for index in range(64))
    whole = max(
        simulate(get_schedule("1F1B")(8, 32), [StageCost(8.0, 16.0, activation_bytes=16)] * 8).peak_bytes
    )
    limit = whole * sixteenths // 16
    best = search(CostModel(units, (0,) * 63), Cluster(8, memory_bytes=limit), microbatches=32)[0]
    assert round(best.bubble, 4) <= bubble
    assert max(best.peak_bytes) <= limit
