from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from partita.planning import CostModel, Unit, plan_stages
from partita.planning.cutting._cuts import find_cuts
from partita.planning.cutting.cut_problem import make_cut_problem
from partita.planning.cutting.equal_stages import cuts_with_equal_stages, distinct_stages, unit_kinds
from partita.planning.plan import Plan

SECONDS = (1.0, 2.0, 3.0, 0.5, 0.1)
BLOCK = "edadbeaca"


def costs_of(kinds: str) -> CostModel:
    """Units by the letters of their kinds, of which each takes seconds of its own."""
    units = tuple(
        Unit(f"{index}", SECONDS[ord(kind) - ord("a")], 0.0, activation_bytes=1, kind=ord(kind))
        for index, kind in enumerate(kinds)
    )
    return CostModel(units, (1,) * (len(units) - 1))


def stages_of(plan: Plan, costs: CostModel) -> list[tuple[int | None, ...]]:
    return [tuple(unit.kind for unit in costs.units[it.first_unit : it.last_unit + 1]) for it in plan.stages]


def test_blocks_are_cut_alike_where_that_costs_little() -> None:
    for behind, differ in (("bb", (7, 4)), ("cc", (8, 5)), ("d", (4, 3))):
        costs = costs_of("d" + BLOCK * 8 + behind)
        without, equal = (plan_stages(costs, 8, for_equal_stages=part) for part in (None, 0.02))
        assert tuple(len(set(stages_of(plan, costs))) for plan in (without, equal)) == differ
        assert equal.bottleneck_s <= 1.02 * without.bottleneck_s


def test_of_cuts_that_are_as_fast_the_ones_with_equal_stages_cost_nothing() -> None:
    costs = costs_of("d" + BLOCK * 8 + "d")
    without, equal = (plan_stages(costs, 8, for_equal_stages=part) for part in (None, 0.0))
    assert len(set(stages_of(equal, costs))) == 3 < len(set(stages_of(without, costs)))
    assert equal.bottleneck_s == without.bottleneck_s


def test_equal_stages_fit_into_the_memory_too() -> None:
    costs = costs_of("d" + BLOCK * 8 + "d")
    limit = max(stage.peak_bytes for stage in plan_stages(costs, 8).stages)
    plan = plan_stages(costs, 8, max_memory_bytes=limit, for_equal_stages=0.5)
    assert max(stage.peak_bytes for stage in plan.stages) <= limit


def test_a_stage_that_recomputes_other_units_is_another_one() -> None:
    kinds, cuts = (0, 1, 2, 1, 2, 3), (0, 1, 3, 5, 6)
    assert distinct_stages(kinds, cuts, ((), ((1, 1),), ((3, 3),), ())) == 3
    assert distinct_stages(kinds, cuts, ((), ((1, 1),), ((4, 4),), ())) == 4


def test_units_without_a_kind_are_like_no_other() -> None:
    units = tuple(
        Unit(name, 1.0, 2.0, kind=kind) for name, kind in zip("abcd", (None, 7, 7, None), strict=True)
    )
    assert unit_kinds(CostModel(units, (1, 1, 1))) == (0, 1, 1, 2)


@given(st.text("abc", min_size=2, max_size=9), st.integers(2, 5), st.sampled_from([0.0, 0.1, 0.5]))
def test_no_more_stages_differ_than_before_and_none_is_slower_than_allowed(
    kinds: str, stages: int, part: float
) -> None:
    costs = costs_of(kinds)
    if stages > len(kinds):
        return
    problem = make_cut_problem(costs, None, (1,) * stages, 4.0, hides_transfers=False)
    before = find_cuts(problem)
    assert before is not None
    after = cuts_with_equal_stages(problem, unit_kinds(costs), before, part)
    bound = (1 + part) * max(problem.time(*ends) for ends in pairwise(before))
    assert max(problem.time(*ends) for ends in pairwise(after)) <= bound
    own = unit_kinds(costs)
    assert distinct_stages(own, after) <= distinct_stages(own, before)
    choices = [(0, *inner, len(kinds)) for inner in combinations(range(1, len(kinds)), stages - 1)]
    within = [one for one in choices if max(problem.time(*ends) for ends in pairwise(one)) <= bound]
    assert distinct_stages(own, after) <= min(distinct_stages(own, one) for one in within) + 1
