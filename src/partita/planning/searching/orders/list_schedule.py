"""The best order of passes that list scheduling and local search find, within the memory of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from partita.planning.generators.making.list_scheduler import (
    ListScheduler,
    Outcome,
    Rule,
    Rules,
    Tails,
    least_capacity,
)
from partita.planning.generators.making.problem import Problem
from partita.planning.schedules.actions import ActionKind
from partita.planning.searching.orders.clock import Rows, Timing, overflow, run_rows
from partita.planning.searching.orders.improve import Budget, improve, lower_bound_s

__all__ = ["Order", "best_order", "first_order"]

_WAITS = (0.0, 0.5, 1.0)
_MOST_IMPROVED = 3
_NUMBER = {ActionKind.F: 0, ActionKind.I: 1, ActionKind.W: 2, ActionKind.B: 3}


class Order(NamedTuple):
    """Rows and when they end; the smaller, the better."""

    end_s: float
    total_s: float
    rows: Rows


def first_order(problem: Problem) -> Order | None:
    """One quick list schedule; None where a rank has no memory for one microbatch."""
    variants = _variants(problem)
    if not variants:
        return None
    return _order(problem, ListScheduler(problem, Rule(max(problem.forward_s), whole=variants[0])).run())


def best_order(problem: Problem, budget: Budget, starts: Iterable[Rows] = ()) -> Order | None:
    """The best order found; None where a rank has no memory for one microbatch.

    1. List schedules by many rules: how long a rank may wait, and which stages cut their backward pass.
    2. The best of them made again, with what has the longest way before it first.
    3. The best few improved along their critical paths.

    Args:
        problem: what has to be scheduled.
        budget: how much may be tried.
        starts: other orders to begin with; those that do not fit are left out.
    """
    orders = [order for rows in starts if (order := timed(problem, rows)) is not None]
    orders += _by_rules(problem, budget.share(0.35))
    if not orders:
        return None
    bound_s = lower_bound_s(problem) * (1 + 1e-9)
    orders.sort(key=_key)
    if orders[0].end_s > bound_s:
        orders += _by_tails(problem, orders[0], budget.share(0.25))
        orders.sort(key=_key)
    improved = list(orders[:1])
    for index, order in enumerate(_distinct(orders)):
        if orders[0].end_s <= bound_s or index == _MOST_IMPROVED:
            break
        timing, rows = improve(problem, order.rows, budget.share(1 / (_MOST_IMPROVED - index)))
        improved.append(_of(timing, rows))
    return min(improved, key=_key)


def timed(problem: Problem, rows: Rows) -> Order | None:
    """The order of these rows; None where they do not fit the memory or wait for each other for ever."""
    if max(overflow(problem, rows)) > 0:
        return None
    timing = run_rows(problem, rows)
    return None if timing is None else _of(timing, rows)


def _of(timing: Timing, rows: Rows) -> Order:
    return Order(timing.end_s, timing.total_s, rows)


def _key(order: Order) -> tuple[float, float]:
    return order[:2]


def _distinct(orders: list[Order]) -> Iterator[Order]:
    last: tuple[float, float] | None = None
    for order in orders:
        if _key(order) != last:
            yield order
        last = _key(order)


def _variants(problem: Problem) -> list[frozenset[int]]:
    """Sets of stages that do B, with which a microbatch fits: the first stage, whose gradient goes nowhere,
    and all, where B takes less than I and W, or where only B fits.
    """
    both = list(zip(problem.whole_s, problem.input_s, problem.weight_s, strict=True))
    every = frozenset(range(problem.stages))
    first = frozenset({0}) if both[0][0] <= both[0][1] + both[0][2] else frozenset[int]()
    variants = [first] if _fits(problem, first) else []
    if (not variants or any(whole < split + weight for whole, split, weight in both)) and _fits(
        problem, every
    ):
        variants.append(every)
    return variants


def _fits(problem: Problem, whole: frozenset[int]) -> bool:
    return all(
        need <= has for need, has in zip(least_capacity(problem, whole), problem.capacity, strict=True)
    )


def _by_rules(problem: Problem, budget: Budget) -> Iterator[Order]:
    longest_s = max(problem.forward_s)
    size = 3 * problem.stages * problem.microbatches
    variants, rules = _variants(problem), Rules(problem)
    for step in (2, 0, 4, 1, 3, 6, 8):
        for whole in variants:
            # A list schedule takes about ten times as long as the timing of its rows.
            if not budget.take(10 * size):
                return
            outcome = rules.run(Rule(2 * longest_s * 0.6**step, whole=whole))
            if outcome is not None:
                yield _order(problem, outcome)


def _by_tails(problem: Problem, start: Order, budget: Budget) -> Iterator[Order]:
    size = 10 * sum(map(len, start.rows))
    whole = frozenset(stage for row in start.rows for kind, stage, _ in row if kind == 3) - frozenset(
        stage for row in start.rows for kind, stage, _ in row if kind == 1
    )
    if not _fits(problem, whole):
        return
    for wait in _WAITS:
        best = start
        while budget.take(size):
            tails = Tails(tails_s(problem, best.rows), wait)
            order = _order(problem, ListScheduler(problem, Rule(0.0, tails=tails, whole=whole)).run())
            yield order
            if order.end_s >= best.end_s * (1 - 1e-9):
                break
            best = order


def tails_s(problem: Problem, rows: Rows) -> tuple[list[float], list[float], list[float]]:
    """For each F, I (or B) and W, by number, the longest way from its start to the end of the step."""
    timing = run_rows(problem, rows)
    if timing is None:
        raise AssertionError("unreachable: the rows come to an end")
    seconds = problem.seconds
    count, last = problem.stages * problem.microbatches, problem.stages - 1
    forward, backward, weight = [0.0] * count, [0.0] * count, [0.0] * count
    by_kind = (forward, backward, weight, backward)
    order = sorted(
        (
            (start, position, rank)
            for rank, starts in enumerate(timing.starts)
            for position, start in enumerate(starts)
        ),
        reverse=True,
    )
    after = [0.0] * len(rows)
    for _, position, rank in order:
        kind, stage, number = rows[rank][position]
        way_s = after[rank]
        if kind == 0:
            then_s = backward[number] if stage == last else forward[number + problem.microbatches]
            way_s = max(way_s, then_s + problem.down_s[stage])
        elif kind != 2 and stage:
            way_s = max(way_s, backward[number - problem.microbatches] + problem.up_s[stage])
        by_kind[kind][number] = after[rank] = way_s + seconds[kind][stage]
    return forward, backward, weight


def _order(problem: Problem, outcome: Outcome) -> Order:
    microbatches = problem.microbatches
    rows = [
        [(_NUMBER[kind], stage, stage * microbatches + number) for kind, stage, number in row]
        for row in outcome.passes
    ]
    timing = run_rows(problem, rows)
    if timing is None:
        raise AssertionError("unreachable: a list schedule comes to an end")
    return _of(timing, rows)
