"""Make rows better, one move at a time, along the critical path.

The critical path is a chain of passes without a gap that determines how long the step takes. Where it stays
on one rank, those passes are a block. To shorten the step, some block has to begin with another pass or to
end with another one, so the moves are: a pass of the block goes to its front, or to its back; and B is cut
into I and W, or I and W are put together. Passes of one kind and stage keep the order of the microbatches.

(J. Grabowski, E. Nowicki and S. Zdrzałka, "A block approach for single-machine scheduling with release dates
and due dates", 1986; E. Nowicki and C. Smutnicki, "A fast taboo search algorithm for the job shop problem",
1996, whose list of forbidden moves is a set of orders that were seen here.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import add
from random import Random
from typing import NamedTuple

from partita.planning.generators.making.problem import Problem
from partita.planning.searching.orders.clock import Pass, Rows, Timing, fits, run_changed_rows, run_rows

__all__ = ["Budget", "improve", "lower_bound_s"]

_SAME = 1e-9
_F, _I, _W, _B = range(4)


class Budget:
    """How many passes may still be timed, so that the same search takes about as long on any problem."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.passes <= 0

    def take(self, passes: int) -> bool:
        """Whether there was as much left; it is taken."""
        self.passes -= passes
        return self.passes >= 0

    def share(self, part: float) -> Budget:
        """A budget of its own, taken from this one."""
        passes = max(int(self.passes * part), 0)
        self.passes -= passes
        return Budget(passes)


class _Block(NamedTuple):
    """Passes of one rank on the critical path, without a gap."""

    rank: int
    first: int
    last: int


def lower_bound_s(problem: Problem, *, trains: bool = True) -> float:
    """No order takes less: a rank's work and how long it waits for its first pass, or a microbatch's way.

    Args:
        problem: what has to be scheduled.
        trains: whether there are backward passes.
    """
    starts, stages = problem.start_s(), range(problem.stages)
    split_s = map(add, problem.input_s, problem.weight_s)
    back_s = list(map(min, problem.whole_s, split_s)) if trains else [0.0] * problem.stages
    work, first = [0.0] * problem.ranks, [float("inf")] * problem.ranks
    for stage, rank in enumerate(problem.stage_ranks):
        work[rank] += problem.microbatches * (problem.forward_s[stage] + back_s[stage])
        first[rank] = min(first[rank], starts[stage])
    way_s = starts[-1] + problem.forward_s[-1]
    if trains:
        way_s += sum(min(problem.input_s[stage], back_s[stage]) + problem.up_s[stage] for stage in stages)
    return max(way_s, *(start + busy for start, busy in zip(first, work, strict=True)))


def improve(problem: Problem, rows: Rows, budget: Budget) -> tuple[Timing, Rows]:
    """The best rows seen from `rows` on, which have to fit the memory and to come to an end.

    From each rows the search goes on with the first move that takes less time, or else with the best one that
    leads to an order not yet seen. The same arguments give the same rows.
    """
    random = Random(0)
    timing = run_rows(problem, rows)
    if timing is None:
        raise AssertionError("unreachable: the rows that are improved come to an end")
    best_timing, best_rows = timing, rows
    bound_s = lower_bound_s(problem) * (1 + _SAME)
    size = sum(map(len, rows))
    marks = [hash(tuple(row)) for row in rows]
    seen = {_mark(marks)}
    while best_timing.end_s > bound_s:
        moves = list(_moves(problem, rows, timing, random))
        random.shuffle(moves)
        chosen: tuple[Timing, Rows, list[int]] | None = None
        for rank, position, row in moves:
            if not fits(problem, rank, row):
                continue
            changed_marks = [*marks[:rank], hash(tuple(row)), *marks[rank + 1 :]]
            mark = _mark(changed_marks)
            if mark in seen:
                continue
            if budget.is_spent:
                return best_timing, best_rows
            changed = [*rows[:rank], row, *rows[rank + 1 :]]
            result, passes = run_changed_rows(problem, changed, timing, rank, position)
            # what a move costs besides: its mark, its memory, a copy of the arrivals
            budget.take(max(passes, size // 8))
            if result is None:
                seen.add(mark)
                continue
            if chosen is None or _key(result) < _key(chosen[0]):
                chosen = result, changed, changed_marks
                if _key(result) < _key(timing):
                    break
        if chosen is None:
            break
        timing, rows, marks = chosen
        seen.add(_mark(marks))
        if _key(timing) < _key(best_timing):
            best_timing, best_rows = timing, rows
    return best_timing, best_rows


def _mark(marks: Sequence[int]) -> int:
    return hash(tuple(marks))


def _key(timing: Timing) -> tuple[float, float]:
    # Rounded, so that the last bit of a sum does not count for more than the ends of the other ranks.
    return float(f"{timing.end_s:.10g}"), timing.total_s


def _moves(
    problem: Problem, rows: Rows, timing: Timing, random: Random
) -> Iterator[tuple[int, int, list[Pass]]]:
    """A rank, where its row changes first, and its changed row, for each move."""
    for block in _critical_blocks(problem, rows, timing, random):
        rank, row = block.rank, rows[block.rank]
        yield from ((rank, first, moved) for first, moved in _shifted(row, block))
        yield from ((rank, first, changed) for first, changed in _joined_or_cut(problem, row, block))


def _critical_blocks(problem: Problem, rows: Rows, timing: Timing, random: Random) -> list[_Block]:
    """From the end of the step backwards; where two reasons keep a pass waiting, one of them at random."""
    seconds = problem.seconds
    places = {
        (kind != _F, number): (rank, position)
        for rank, row in enumerate(rows)
        for position, (kind, _, number) in enumerate(row)
        if kind != _W
    }
    ends = [
        timing.starts[rank][-1] + seconds[row[-1][0]][row[-1][1]] if row else 0.0
        for rank, row in enumerate(rows)
    ]
    last = [rank for rank, end in enumerate(ends) if end >= timing.end_s * (1 - _SAME)]
    rank = random.choice(last)
    position = len(rows[rank]) - 1
    blocks: list[_Block] = []
    end = position
    while True:
        kind, stage, number = rows[rank][position]
        start = timing.starts[rank][position]
        no_gap = False
        if position:
            before = rows[rank][position - 1]
            before_end = timing.starts[rank][position - 1] + seconds[before[0]][before[1]]
            no_gap = before_end >= start * (1 - _SAME)
        source = _source(problem, kind, stage, number, places)
        arrival = timing.arrivals[problem.hops[kind][stage].takes + number]
        arrives = source is not None and arrival >= start * (1 - _SAME)
        if no_gap and not (arrives and random.random() < 0.5):
            position -= 1
            continue
        if end > position:
            blocks.append(_Block(rank, position, end))
        if source is None or not arrives:
            return blocks
        rank, position = source
        end = position


def _source(
    problem: Problem, kind: int, stage: int, number: int, places: dict[tuple[bool, int], tuple[int, int]]
) -> tuple[int, int] | None:
    """Where the pass stands whose result this one takes."""
    if kind == _W:
        return None
    if kind == _F:
        return places[False, number - problem.microbatches] if stage else None
    if stage == problem.stages - 1:
        return places[False, number]
    return places[True, number + problem.microbatches]


def _shifted(row: list[Pass], block: _Block) -> Iterator[tuple[int, list[Pass]]]:
    """The first pass of each kind and stage to the front of the block, the last one to its back."""
    first, last = block.first, block.last
    seen: set[tuple[int, int]] = set()
    for position in range(first, last + 1):
        one = row[position]
        if one[:2] not in seen:
            seen.add(one[:2])
            if position > first and not any(_precedes(other, one) for other in row[first:position]):
                yield first, [*row[:first], one, *row[first:position], *row[position + 1 :]]
    seen.clear()
    for position in range(last, first - 1, -1):
        one = row[position]
        if one[:2] not in seen:
            seen.add(one[:2])
            if position < last and not any(_precedes(one, other) for other in row[position + 1 : last + 1]):
                yield position, [*row[:position], *row[position + 1 : last + 1], one, *row[last + 1 :]]


def _precedes(one: Pass, other: Pass) -> bool:
    """Whether `one`, which stands before `other`, has to stay there."""
    if one[1] != other[1]:
        return False
    if one[0] == other[0] or (one[0] in (_I, _B) and other[0] in (_I, _B)):
        return True
    if one[0] in (_W, _B) and other[0] in (_W, _B):
        return True
    return one[2] == other[2]


def _joined_or_cut(problem: Problem, row: Sequence[Pass], block: _Block) -> Iterator[tuple[int, list[Pass]]]:
    """B in place of an I and its W, or the other way round, at a block's ends."""
    waiting: dict[tuple[int, int], int] = {}
    for position in range(block.first, block.last + 1):
        kind, stage, number = row[position]
        if kind == _B:
            if position in (block.first, block.last):
                parts = ((_I, stage, number), (_W, stage, number))
                yield position, [*row[:position], *parts, *row[position + 1 :]]
        elif kind == _I:
            waiting[stage, number] = position
        elif kind == _W and (stage, number) in waiting:
            start = waiting[stage, number]
            between = row[start + 1 : position]
            saves = problem.whole_s[stage] < problem.input_s[stage] + problem.weight_s[stage]
            if saves and not any(_precedes(other, (_W, stage, number)) for other in between):
                yield start, [*row[:start], (_B, stage, number), *between, *row[position + 1 :]]
