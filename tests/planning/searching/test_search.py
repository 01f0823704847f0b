from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from tests.planning.profiles import best_named_s, random_profile

from partita.errors import InfeasiblePlan, PlanError, ScheduleError
from partita.planning import (
    Cluster,
    CostModel,
    LinkLevel,
    Plan,
    StageCost,
    TiedUnits,
    Unit,
    get_schedule,
    plan_stages,
    reduced_tied_gradients,
    schedule_of,
    search,
    simulate,
    stage_costs,
    validate,
)

UNITS = tuple(Unit(f"u{index}", 1.0, 2.0, parameter_bytes=10, activation_bytes=5) for index in range(8))
COSTS = CostModel(UNITS, (4,) * 7)


def test_the_fastest_comes_first() -> None:
    candidates = search(COSTS, Cluster(4))
    times = [candidate.makespan_s for candidate in candidates]
    assert times == sorted(times)
    names = {candidate.plan.schedule for candidate in candidates}
    assert names >= {"GPipe", "1F1B", "ZBVZeroBubble", "DualPipeV", "ListSchedule"}


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(2, 8.0, 0.5),
        Cluster(3, latency_s=0.2, speeds=(1.0, 0.5, 2.0)),
        Cluster(2, memory_bytes=190),
        Cluster(4, memories=(None, 120, 110, 200)),
        Cluster.of_nodes(2, 2, LinkLevel(latency_s=0.1), LinkLevel(latency_s=0.4, ports=1)),
    ],
)
def test_a_candidate_is_what_its_plan_simulates_to(cluster: Cluster) -> None:
    for candidate in search(COSTS, cluster, microbatches=4):
        plan = Plan.from_json(candidate.plan.to_json())
        schedule = schedule_of(plan)
        validate(schedule)
        result = simulate(schedule, plan)
        assert candidate.makespan_s == pytest.approx(result.makespan_s)
        assert candidate.bubble == pytest.approx(result.bubble)
        assert candidate.span_bubble == pytest.approx(result.span_bubble)
        assert candidate.peak_bytes == result.peak_bytes
        for rank, peak in enumerate(result.peak_bytes):
            limit = cluster.memory(rank)
            assert limit is None or peak <= limit


def test_every_candidate_fits_the_memory_and_uses_every_rank() -> None:
    cluster = Cluster(4, memory_bytes=140)
    candidates = search(COSTS, cluster, recompute=False)
    assert all(max(candidate.peak_bytes) <= 140 for candidate in candidates)
    assert all(candidate.plan.ranks == 4 for candidate in candidates)
    assert "GPipe" not in {candidate.plan.schedule for candidate in candidates}


def test_recomputation_lets_gpipe_fit() -> None:
    cluster = Cluster(4, memory_bytes=140)
    candidates = {one.plan.schedule: one for one in search(COSTS, cluster)}
    assert any(stage.recompute for stage in candidates["GPipe"].plan.stages)
    assert max(candidates["GPipe"].peak_bytes) <= 140


def test_zbv_that_fits_exactly_is_not_refused() -> None:
    units = tuple(Unit(f"block{index}", 1.0, 2.0, activation_bytes=1) for index in range(16))
    costs = CostModel(units, (0,) * 15)
    plan = plan_stages(costs, 8, schedule="ZBVZeroBubble", microbatches=12)
    limit = max(simulate(schedule_of(plan), plan).peak_bytes)
    best = search(
        costs, Cluster(4, memory_bytes=limit), microbatches=12, schedules=["ZBVZeroBubble"], recompute=False
    )
    assert max(best[0].peak_bytes) <= limit


def test_the_same_arguments_give_the_same_plans() -> None:
    first, second = (search(COSTS, Cluster(2, memory_bytes=190), microbatches=4) for _ in range(2))
    assert first == second


def test_one_rank_one_unit_and_no_time_at_all() -> None:
    alone = search(CostModel((Unit("u", 0.0, 0.0),), ()), Cluster(1), microbatches=1)
    assert alone[0].makespan_s == 0.0
    huge = Unit("u", 1e300, 1e300, activation_bytes=10**18)
    assert search(CostModel((huge,), ()), Cluster(1), microbatches=2)[0].makespan_s == 4e300


def test_a_schedule_without_backward_passes_can_be_asked_for() -> None:
    best = search(COSTS, Cluster(2, memory_bytes=200), schedules=["ForwardOnly"])[0]
    assert best.plan.schedule == "ForwardOnly"
    result = simulate(schedule_of(best.plan), best.plan)
    assert (best.makespan_s, best.peak_bytes) == (pytest.approx(result.makespan_s), result.peak_bytes)


@pytest.mark.parametrize("other", ["ListSchedule", "1f1b"])
def test_a_schedule_without_backward_passes_is_no_candidate_for_training(other: str) -> None:
    """It was the first of the list, being the fastest."""
    message = f"schedules has 'ForwardOnly', which has no backward passes, beside '{other}'"
    with pytest.raises(ScheduleError, match=re.escape(message)):
        search(COSTS, Cluster(2), microbatches=3, schedules=["forwardonly", other])


def test_names_of_schedules_are_texts() -> None:
    """A text alone was taken letter by letter, and anything else had no attribute 'lower'."""
    alone, listed = (search(COSTS, Cluster(2), microbatches=3, schedules=one) for one in ("1F1B", ["1F1B"]))
    assert alone == listed
    for wrong in (["one"], [int], [None]):
        with pytest.raises(ScheduleError, match=r"there is no schedule .* a ListSchedule"):
            search(COSTS, Cluster(2), schedules=wrong)  # type: ignore[arg-type]


def test_orders_of_its_own_can_be_asked_for_alone() -> None:
    candidates = search(COSTS, Cluster(2), schedules=["ListSchedule"], microbatches=4)
    assert {candidate.plan.schedule for candidate in candidates} == {"ListSchedule"}


def test_progress_goes_from_nothing_to_all() -> None:
    told: list[tuple[str, float]] = []
    search(COSTS, Cluster(2), microbatches=2, progress=lambda what, part: told.append((what, part)))
    parts = [part for _, part in told]
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (0.0, 1.0)


def test_what_is_short_and_a_change_that_fits_stand_in_one_line() -> None:
    """A stage of two units takes 2 * 40 bytes all the time and 10 for a microbatch."""
    options = {"microbatches": 2, "recompute": False}
    with pytest.raises(InfeasiblePlan) as caught:
        search(COSTS, Cluster(4, memory_bytes=80), **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 250
    assert re.search(r"rank \d \(stage \d, units 'u\d' to 'u\d'\) is short by 10 bytes of 80", message)
    assert message.endswith("with 8 ranks it would fit")  # with fewer, one of them has two units
    assert search(COSTS, Cluster(8, memory_bytes=80), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "options", "change"),
    [
        (140, {"schedules": ["GPipe"], "recompute": False}, "or with recompute=True it would fit"),
        (110, {"schedules": ["GPipe"]}, "or with other schedules (schedules=None) it would fit"),
        (1, {}, "with memory_bytes=89 (89 bytes a rank) it would fit"),
    ],
)
def test_the_change_that_is_named(memory: int, options: dict[str, object], change: str) -> None:
    with pytest.raises(InfeasiblePlan, match=f"{re.escape(change)}$"):
        search(COSTS, Cluster(4, memory_bytes=memory), **options)  # type: ignore[arg-type]


def test_more_ranks_than_units_are_refused() -> None:
    with pytest.raises(InfeasiblePlan, match="9 stages for 9 ranks were asked for, but this model can be"):
        search(COSTS, Cluster(9))


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match="there is no schedule 'x'"):
        search(COSTS, Cluster(2), schedules=["x"])


def test_a_search_for_one_schedule_moves_its_cuts_for_as_long_as_a_search_for_all_would() -> None:
    """Three quarters of the effort were kept for orders that nobody had asked for. Of a mixture of experts on
    16 ranks, the plan for ZBH1 was slower than balanced times, and this one takes 0.98 of those.
    """
    layers = [
        Unit(f"{what}{n}", s, 2 * s) for n in range(44) for what, s in (("attention", 2.0), ("mlp", 7.0))
    ]
    units = (Unit("embedding", 0.1, 0.4), *layers, Unit("head", 1.0, 2.0))
    costs, cluster = CostModel(units, (8,) * 89), Cluster(10, bandwidth_bytes_per_s=100.0)
    named = search(costs, cluster, microbatches=20, schedules=["Interleaved1F1B"], stages_per_rank=[2])
    assert named[0].makespan_s < 3000.0


def test_borders_are_moved_from_all_cuts_that_promise_something() -> None:
    """They were moved from the best cuts alone, and stopped at 412 s: balanced times took 341."""
    random = Random(113)
    count, _ = random.randint(20, 60), random.choice(range(5))
    units = []
    for number in range(count):
        forward_s = random.choice([0.01, 1, 1, 1, 3, 10]) * random.uniform(0.8, 1.2)
        units.append(Unit(f"u{number}", forward_s, 2 * forward_s, parameter_bytes=int(1e6 * forward_s)))
        random.uniform(0.2, 3)
    costs = CostModel(tuple(units), (8,) * (count - 1))
    options = {"microbatches": 6, "schedules": ["LoopedBFS"], "stages_per_rank": [2]}
    assert search(costs, Cluster(6), **options)[0].makespan_s < 345.0  # type: ignore[arg-type]


def test_a_step_too_long_to_plan_is_refused_at_once() -> None:
    """With a hundred million microbatches, memory grew until the process was killed."""
    with pytest.raises(ScheduleError, match=r"has 2000000 forward passes, more than .*: give fewer of them"):
        search(COSTS, Cluster(2), microbatches=500_000)


def test_a_schedule_that_can_not_serve_the_numbers_says_why() -> None:
    with pytest.raises(InfeasiblePlan, match="DualPipeV with 2 microbatches on 4 stages: give at least 4"):
        search(COSTS, Cluster(2), schedules=["DualPipeV"], microbatches=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stages_per_rank": [0]}, "a number in stages_per_rank is 0"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"parameter_copies": -1.0}, "parameter_copies is -1.0"),
        ({"parameter_copies": 1e308}, r"parameter_copies is 1e\+308: give at most 1000000, such as 4"),
    ],
)
def test_a_number_out_of_range_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        search(COSTS, Cluster(2), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("sixteenths", "bubble"), [(10, 0.0813), (8, 0.1233)])
def test_a_budget_of_memory_costs_no_more_than_in_the_paper(sixteenths: int, bubble: float) -> None:
    """1F1B with fewer microbatches in flight had 0.316 and 0.486 here."""
    units = tuple(Unit(f"block{index}", 1.0, 2.0, activation_bytes=2) for index in range(64))
    whole = max(
        simulate(get_schedule("1F1B")(8, 32), [StageCost(8.0, 16.0, activation_bytes=16)] * 8).peak_bytes
    )
    limit = whole * sixteenths // 16
    costs, cluster = CostModel(units, (0,) * 63), Cluster(8, memory_bytes=limit)
    names = ["1F1B", "ZBVZeroBubble", "VHalf", "VMin"]
    best = search(costs, cluster, microbatches=32, recompute=False, schedules=names)[0]
    assert round(best.bubble, 4) <= bubble
    assert max(best.peak_bytes) <= limit


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 7])
def test_no_named_schedule_that_fits_is_better(seed: int) -> None:
    """`make fuzz` tries 300."""
    profile = random_profile(seed, most_ranks=3)
    try:
        best = search(profile.costs, profile.cluster, microbatches=profile.microbatches)[0]
    except InfeasiblePlan:
        assert best_named_s(profile) == float("inf")
        return
    assert best.makespan_s <= best_named_s(profile) * (1 + 1e-9)


def test_schedules_made_for_costs_have_the_cuts_of_their_plans() -> None:
    """Borders were moved a quarter as often before the schedule was made: 207.6 s in place of 206.1 s."""
    profile = random_profile(148)
    plan = plan_stages(
        profile.costs, 12, cluster=profile.cluster, schedule="ZB2p", microbatches=profile.microbatches
    )
    named = get_schedule("ZB2p")(
        12, profile.microbatches, 6, costs=stage_costs(plan), cluster=profile.cluster
    )
    best = search(profile.costs, profile.cluster, microbatches=profile.microbatches, schedules=["ZB2p"])[0]
    assert best.makespan_s <= simulate(named, stage_costs(plan), profile.cluster).makespan_s * (1 + 1e-9)


def test_each_start_whose_cuts_are_moved_is_another_one() -> None:
    """The best one was moved twice with half of what may be tried, and nothing was found that fits."""
    profile = random_profile(19, most_ranks=6)
    best = search(profile.costs, profile.cluster, microbatches=profile.microbatches)[0]
    assert max(best.peak_bytes) <= (profile.cluster.memory(0) or 0)


def test_each_schedule_made_for_costs_gets_its_borders_moved() -> None:
    """Only the best was: two stages a rank took 158.6 s in place of 136.7 s."""
    profile = random_profile(14, most_ranks=6)
    candidates = search(profile.costs, profile.cluster, microbatches=profile.microbatches, schedules=["ZB2p"])
    first, second = (candidate.makespan_s for candidate in candidates)
    assert first < 122.8
    assert second < 136.8


@pytest.mark.parametrize("seed", range(2))
def test_unequal_ranks_are_planned_for(seed: int) -> None:
    profile = random_profile(4 * seed + 1, most_ranks=3)
    speeds = tuple(1.0 if rank % 2 else 3.0 for rank in range(profile.cluster.ranks))
    unequal = replace(profile.cluster, speeds=speeds)
    best = search(profile.costs, unequal, microbatches=profile.microbatches)[0]
    equal = search(profile.costs, profile.cluster, microbatches=profile.microbatches)[0].plan
    assert best.makespan_s < simulate(schedule_of(equal), equal, unequal).makespan_s


def test_stages_change_ranks_only_where_the_step_with_its_sums_is_shorter() -> None:
    """An order without its sum was compared with one that had it, and looked better: 79.8 s in place of
    75.9 s.
    """
    random = Random(5)
    units = tuple(
        Unit(
            f"l{index}",
            random.uniform(0.5, 2),
            random.uniform(1, 4),
            parameter_bytes=100,
            activation_bytes=3,
            backward_input_s=random.uniform(0.5, 2),
            backward_weight_s=random.uniform(0.3, 1.5),
        )
        for index in range(10)
    )
    tied = CostModel(units, (2,) * 9, tied=(TiedUnits((0, 9), 100, gradient_bytes=100),))
    cluster = Cluster(3, bandwidth_bytes_per_s=10.0, latency_s=0.05)
    assert search(reduced_tied_gradients(tied), cluster, microbatches=6)[0].makespan_s < 76.0
