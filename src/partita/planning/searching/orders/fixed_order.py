"""The clock for rows that stay while costs change: what runs after what is worked out once, not each time.

Which pass waits for which follows from the rows and the ranks of the stages; costs only say for how long. So
the passes of all ranks are laid out as stretches, in an order in which nothing has to wait for what comes
later, and timing them goes once over that list.
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.planning.generators.making.problem import Problem
from partita.planning.searching.orders.clock import Pass, Rows, run_rows
from partita.planning.searching.orders.rows_memo import RowsMemo

__all__ = ["FixedOrders", "ends_of", "fixed_order"]

_PASSES_KEPT = 600_000
"""The orders of so many passes are remembered; they take 150 bytes a pass."""

_Step = tuple[int, int, int, int]
"""A pass: the place of its kind and stage in the tables of seconds, the places of what it takes and makes,
and the rank that this goes to; -1 where it stays."""

FixedOrder = list[tuple[int, list[_Step]]]
"""Stretches of passes, each with its rank."""


class FixedOrders:
    """Times rows, and remembers the orders of those that come again."""

    def __init__(self) -> None:
        self._orders = RowsMemo[FixedOrder | None](_PASSES_KEPT)

    def ends(self, problem: Problem, rows: Rows, *, again: bool) -> list[float] | None:
        """When each rank ends; None where the rows wait for each other for ever.

        Args:
            problem: the costs.
            rows: for each rank its passes.
            again: whether the rows have been timed before; then they are likely to be so many times.
        """
        if not again:
            timing = run_rows(problem, rows)
            return None if timing is None else timing.ends
        orders = self._orders.of(rows)
        if problem.stage_ranks not in orders:
            orders[problem.stage_ranks] = fixed_order(problem, rows)
        order = orders[problem.stage_ranks]
        return None if order is None else ends_of(problem, order)


def fixed_order(problem: Problem, rows: Sequence[Sequence[Pass]]) -> FixedOrder | None:
    """The stretches of some rows; None where the rows wait for each other for ever.

    Args:
        problem: any with those stages, ranks and microbatches.
        rows: for each rank its passes.
    """
    hops, stages = problem.hops, problem.stages
    is_there = bytearray(_places(problem))
    for place in _there_from_the_start(problem):
        is_there[place] = 1
    order: FixedOrder = []
    done = [0] * len(rows)
    waiting: dict[int, int] = {}
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, steps = rows[rank], list[_Step]()
        for position in range(done[rank], len(row)):
            kind, stage, number = row[position]
            _, takes, gives, _, there = hops[kind][stage]
            if not is_there[takes + number]:
                waiting[takes + number] = rank
                break
            gives += number
            is_there[gives] = 1
            steps.append((kind * stages + stage, takes + number, gives, there))
            if gives in waiting:
                runnable.append(waiting.pop(gives))
        done[rank] += len(steps)
        order.append((rank, steps))
    if done != list(map(len, rows)):
        return None
    return order


def ends_of(problem: Problem, order: FixedOrder) -> list[float]:
    """For each rank, when its last pass ends: the times of `run_rows`, to the last bit."""
    seconds = [hop.seconds for of_kind in problem.hops for hop in of_kind]
    travel_s = [hop.travel_s for of_kind in problem.hops for hop in of_kind]
    arrivals = [0.0] * _places(problem)
    free = [0.0] * problem.ranks
    links = [[0.0] * problem.ranks for _ in free]
    for rank, steps in order:
        now, own_links = free[rank], links[rank]
        for which, takes, gives, there in steps:
            arrival = arrivals[takes]
            if arrival > now:
                now = arrival
            now += seconds[which]
            if there < 0:
                arrivals[gives] = now
                continue
            arrival = own_links[there]
            if now > arrival:
                arrival = now
            own_links[there] = arrivals[gives] = arrival + travel_s[which]
        free[rank] = now
    return free


def _places(problem: Problem) -> int:
    return 2 * (problem.stages + 1) * problem.microbatches


def _there_from_the_start(problem: Problem) -> Sequence[int]:
    """The places of what the first stage's F takes, and of what W takes."""
    places = range(_places(problem))
    return (*places[: problem.microbatches], *places[-problem.microbatches :])
