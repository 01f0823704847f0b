from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.searching.orders.test_clock import clusters, stage_costs

from partita.planning import get_schedule, validate
from partita.planning.generators.making.list_scheduler import least_capacity
from partita.planning.generators.making.problem import Problem, scheduling_problem
from partita.planning.searching.orders.clock import make_schedule, overflow, rows_of, run_rows
from partita.planning.searching.orders.improve import Budget, improve, lower_bound_s
from partita.planning.searching.orders.list_schedule import best_order, first_order


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any placement of up to six stages on up to three ranks."""
    ranks = draw(st.integers(1, 3))
    rest = draw(st.lists(st.integers(0, ranks - 1), max_size=3))
    placement = tuple(draw(st.permutations([*range(ranks), *rest])))
    costs, cluster = draw(stage_costs(len(placement))), draw(clusters(ranks))
    return scheduling_problem(costs, placement, draw(st.integers(1, 5)), cluster)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_orders_are_right_and_fit_and_get_no_worse(problem: Problem) -> None:
    first = first_order(problem)
    whole = frozenset(range(problem.stages))
    needs = zip(least_capacity(problem, whole), problem.capacity, strict=True)
    if all(need <= has for need, has in needs):
        assert first is not None
    best = best_order(problem, Budget(30_000))
    if first is None or best is None:
        assert first is best
        return
    assert lower_bound_s(problem) * (1 - 1e-9) <= best.end_s <= first.end_s * (1 + 1e-9)
    for order in (first, best):
        validate(make_schedule("list", problem.stage_ranks, problem.microbatches, order.rows))
        assert max(overflow(problem, order.rows)) <= 0
        timing = run_rows(problem, order.rows)
        assert timing is not None
        assert timing.end_s == order.end_s


@given(problems())
@settings(max_examples=30, deadline=None)
def test_the_same_problem_gives_the_same_order(problem: Problem) -> None:
    assert best_order(problem, Budget(20_000)) == best_order(problem, Budget(20_000))


@given(problems())
@settings(max_examples=60, deadline=None)
def test_what_is_improved_keeps_every_pass(problem: Problem) -> None:
    rows = rows_of(
        get_schedule("GPipe").generate(problem.stages, problem.microbatches, placement=problem.stage_ranks)
    )
    if max(overflow(problem, rows)) > 0:
        return
    before = run_rows(problem, rows)
    timing, better = improve(problem, rows, Budget(20_000))
    assert before is not None
    assert timing.end_s <= before.end_s
    validate(make_schedule("better", problem.stage_ranks, problem.microbatches, better))
