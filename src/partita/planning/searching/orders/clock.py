"""The simulator's clock for a search: the same times, of rows that change, without a record of each action.

A pass is (kind, stage, number): kinds count F 0, I 1, W 2, B 3, and the number is ``stage * microbatches +
microbatch``. Each stage feeds the next. A link carries the messages of one rank to another in the order of
the sender's row; where a cluster has links that several ranks share, only `simulate` knows what that costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.planning.generators.making.problem import Problem
from partita.planning.schedules.actions import PASS_KINDS, PASS_NUMBERS, Action
from partita.planning.schedules.schedule import Schedule

__all__ = [
    "Pass",
    "Rows",
    "Timing",
    "fits",
    "has_backward",
    "make_schedule",
    "most_held",
    "one_by_one",
    "overflow",
    "rows_of",
    "run_changed_rows",
    "run_rows",
]

Pass = tuple[int, int, int]
Rows = list[list[Pass]]

_NEVER = -1.0


@dataclass(frozen=True)
class Timing:
    """When the passes of some rows start and end.

    Attributes:
        end_s: the makespan.
        ends: for each rank, when its last pass ends.
        starts: for each rank, the start of each pass.
        arrivals: when what a pass takes is there: of F by number, then of B or I by number; what stands
            behind those is the clock's own.
        total_s: the ends of all ranks added up; of two rows that take equally long, the lower is nearer to
            taking less.
    """

    end_s: float
    ends: list[float]
    starts: list[list[float]]
    arrivals: list[float]
    total_s: float


def run_rows(problem: Problem, rows: Sequence[Sequence[Pass]]) -> Timing | None:
    """Each pass as soon as it can; None where the rows wait for each other for ever."""
    microbatches = problem.microbatches
    # Behind the arrivals: places for what nobody takes, and for what W takes, which is always there.
    unused = [_NEVER] * (2 * problem.stages * microbatches + microbatches)
    arrivals = [*unused, *[0.0] * microbatches]
    arrivals[:microbatches] = [0.0] * microbatches
    starts: list[list[float]] = [[] for _ in rows]
    return _run(problem, rows, arrivals, starts, [0.0] * len(rows), [[0.0] * len(rows) for _ in rows])


def run_changed_rows(
    problem: Problem, rows: Sequence[Sequence[Pass]], before: Timing, rank: int, position: int
) -> tuple[Timing | None, int]:
    """The timing of rows that differ from those timed `before` in one rank's passes from a position on, and
    of how many passes it was made: what started before the first change is as it was.
    """
    hops = problem.hops
    since_s = _end_of(problem, rows[rank], before.starts[rank], position)
    arrivals = before.arrivals.copy()
    starts: list[list[float]] = []
    free: list[float] = []
    links: list[list[float]] = []
    for index, (row, old_starts) in enumerate(zip(rows, before.starts, strict=True)):
        kept = position if index == rank else bisect_left(old_starts, since_s)
        for kind, stage, number in row[kept:]:
            arrivals[hops[kind][stage].gives + number] = _NEVER
        starts.append(old_starts[:kept])
        free.append(_end_of(problem, row, old_starts, kept))
        links.append(_link_times(problem, index, row, kept, arrivals))
    passes = sum(map(len, rows)) - sum(map(len, starts))
    return _run(problem, rows, arrivals, starts, free, links), passes


def _end_of(problem: Problem, row: Sequence[Pass], starts: Sequence[float], position: int) -> float:
    """When the pass before a position ends."""
    if not position:
        return 0.0
    kind, stage, _ = row[position - 1]
    return starts[position - 1] + problem.seconds[kind][stage]


def _link_times(
    problem: Problem, rank: int, row: Sequence[Pass], position: int, arrivals: Sequence[float]
) -> list[float]:
    """For each rank, when the last message to it arrives of those that are sent before a position."""
    times = [0.0] * problem.ranks
    missing = set(problem.receivers[rank])
    while position and missing:
        position -= 1
        kind, stage, number = row[position]
        hop = problem.hops[kind][stage]
        if hop.there in missing:
            missing.remove(hop.there)
            times[hop.there] = arrivals[hop.gives + number]
    return times


def _run(
    problem: Problem,
    rows: Sequence[Sequence[Pass]],
    arrivals: list[float],
    starts: list[list[float]],
    free: list[float],
    links: list[list[float]],
) -> Timing | None:
    """Time the passes behind those that have a start; the arguments are what is known of those that have."""
    hops = problem.hops
    waiting: dict[int, int] = {}
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, own_starts, own_links, now = rows[rank], starts[rank], links[rank], free[rank]
        for position in range(len(own_starts), len(row)):
            kind, stage, number = row[position]
            seconds, takes, gives, travel_s, there = hops[kind][stage]
            arrival = arrivals[takes + number]
            if arrival > now:
                now = arrival
            elif arrival < 0:
                waiting[takes + number] = rank
                break
            own_starts.append(now)
            now += seconds
            if there < 0:
                arrivals[gives + number] = now
                continue
            arrival = own_links[there]
            if now > arrival:
                arrival = now
            own_links[there] = arrivals[gives + number] = arrival = arrival + travel_s
            if gives + number in waiting:
                runnable.append(waiting.pop(gives + number))
        free[rank] = now
    if any(len(row) != len(done) for row, done in zip(rows, starts, strict=True)):
        return None
    return Timing(max(free), free, starts, arrivals, sum(free))


def most_held(problem: Problem, rows: Sequence[Sequence[Pass]]) -> list[float]:
    """For each rank the most bytes that its passes hold, without those that are there all the time."""
    during, after = problem.memory_tables
    worst: list[float] = []
    for row in rows:
        if not has_backward(row):
            worst.append(max((during[0][stage] for _, stage, _ in row), default=0.0))
            continue
        current = most = 0.0
        for kind, stage, _ in row:
            peak = current + during[kind][stage]
            if peak > most:
                most = peak
            current += after[kind][stage]
        worst.append(most)
    return worst


def overflow(problem: Problem, rows: Sequence[Sequence[Pass]]) -> list[float]:
    """For each rank, by how many bytes it exceeds its memory; negative where bytes are left."""
    return [
        most - capacity for most, capacity in zip(most_held(problem, rows), problem.capacity, strict=True)
    ]


def fits(problem: Problem, rank: int, row: Sequence[Pass]) -> bool:
    """Return whether a rank that runs these passes in this order never holds more than its capacity."""
    during, after = problem.memory_tables
    current, capacity = 0.0, problem.capacity[rank]
    for kind, stage, _ in row:
        if current + during[kind][stage] > capacity:
            return False
        current += after[kind][stage]
    return True


def has_backward(row: Sequence[Pass]) -> bool:
    """Whether anything is kept for a backward pass."""
    return any(kind != 0 for kind, _, _ in row)


def rows_of(schedule: Schedule) -> Rows:
    """What each rank computes, as numbers; passes that run together one after the other."""
    microbatches = schedule.microbatches
    rows: Rows = [[] for _ in range(schedule.ranks)]
    for rank, part in schedule.passes():
        number = part.stage * microbatches + (part.microbatch or 0)
        rows[rank].append((PASS_NUMBERS[part.kind], part.stage, number))
    return rows


def one_by_one(stage_ranks: Sequence[int], microbatches: int) -> Rows:
    """One microbatch after the other: no order takes less memory."""
    rows: Rows = [[] for _ in range(max(stage_ranks) + 1)]
    for microbatch in range(microbatches):
        for stage, rank in enumerate(stage_ranks):
            rows[rank].append((0, stage, stage * microbatches + microbatch))
        for stage, rank in reversed(list(enumerate(stage_ranks))):
            rows[rank].append((3, stage, stage * microbatches + microbatch))
    return rows


def make_schedule(
    name: str, stage_ranks: tuple[int, ...], microbatches: int, rows: Iterable[Iterable[Pass]]
) -> Schedule:
    """Return the rows as a schedule: each pass, three numbers, becomes the action that it stands for."""
    actions = tuple(
        tuple(Action(stage, PASS_KINDS[kind], number - stage * microbatches) for kind, stage, number in row)
        for row in rows
    )
    return Schedule(name, stage_ranks, microbatches, actions)
