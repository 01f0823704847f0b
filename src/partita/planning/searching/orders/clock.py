"""The simulator's clock for a search: the same times, of rows that change, without a record of each action.

A pass is (kind, stage, number): kinds count F 0, I 1, W 2, B 3, and the number is ``stage * microbatches +
microbatch``. Each stage feeds the next. A link carries the messages of one rank to another in the order of
the sender's row; where a cluster has links that several ranks share, only `simulate` knows what that costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.planning.generators.making.problem import Problem
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.schedule import Schedule

__all__ = [
    "PASS_KINDS",
    "Pass",
    "Rows",
    "Timing",
    "fits",
    "has_backward",
    "make_schedule",
    "one_by_one",
    "overflow",
    "rows_of",
    "run_rows",
]

Pass = tuple[int, int, int]
Rows = list[list[Pass]]

PASS_KINDS = (ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B)
"""By their numbers in a `Pass`."""
_NUMBER = {kind: number for number, kind in enumerate(PASS_KINDS)}
_NEVER = -1.0


@dataclass(frozen=True)
class Timing:
    """When the passes of some rows start and end.

    Attributes:
        end_s: the makespan.
        starts: for each rank, the start of each pass.
        arrivals: for each pass but W, by kind (F, I or B) and number, when what it takes is there.
        total_s: the ends of all ranks added up; of two rows that take equally long, the lower is nearer to
            taking less.
    """

    end_s: float
    starts: list[list[float]]
    arrivals: tuple[list[float], list[float]]
    total_s: float


def run_rows(problem: Problem, rows: Sequence[Sequence[Pass]]) -> Timing | None:
    """Each pass as soon as it can; None where the rows wait for each other for ever."""
    microbatches, ranks = problem.microbatches, problem.stage_ranks
    last = problem.stages - 1
    seconds = (problem.forward_s, problem.input_s, problem.weight_s, problem.whole_s)
    down_s, up_s = problem.down_s, problem.up_s
    forward_at = [_NEVER] * (problem.stages * microbatches)
    input_at = list(forward_at)
    forward_at[:microbatches] = [0.0] * microbatches
    links = [[0.0] * len(rows) for _ in rows]
    free = [0.0] * len(rows)
    starts: list[list[float]] = [[] for _ in rows]
    waiting: dict[tuple[bool, int], int] = {}
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, own_starts, own_links, now = rows[rank], starts[rank], links[rank], free[rank]
        for position in range(len(own_starts), len(row)):
            kind, stage, number = row[position]
            if kind == 2:
                own_starts.append(now)
                now += seconds[2][stage]
                continue
            backward = kind != 0
            arrival = input_at[number] if backward else forward_at[number]
            if arrival < 0:
                waiting[backward, number] = rank
                break
            if arrival > now:
                now = arrival
            own_starts.append(now)
            now += seconds[kind][stage]
            # What it makes goes to the stage after, or (a gradient) to the stage before.
            if backward:
                if not stage:
                    continue
                target, into, travel_s = number - microbatches, input_at, up_s[stage]
                there = ranks[stage - 1]
            elif stage == last:
                input_at[number] = now
                continue
            else:
                target, into, travel_s = number + microbatches, forward_at, down_s[stage]
                there = ranks[stage + 1]
            if there == rank:
                into[target] = now
                continue
            arrival = own_links[there]
            if now > arrival:
                arrival = now
            own_links[there] = into[target] = arrival = arrival + travel_s
            other = waiting.pop((backward, target), -1)
            if other >= 0:
                runnable.append(other)
        free[rank] = now
    if any(len(row) != len(done) for row, done in zip(rows, starts, strict=True)):
        return None
    return Timing(max(free), starts, (forward_at, input_at), sum(free))


def overflow(problem: Problem, rows: Sequence[Sequence[Pass]]) -> list[float]:
    """For each rank, by how many bytes it exceeds its memory; negative where bytes are left."""
    during, after = _memory_tables(problem)
    worst = []
    for row, capacity in zip(rows, problem.capacity, strict=True):
        if not has_backward(row):
            worst.append(max((during[0][stage] for _, stage, _ in row), default=0.0) - capacity)
            continue
        current = most = 0.0
        for kind, stage, _ in row:
            peak = current + during[kind][stage]
            if peak > most:
                most = peak
            current += after[kind][stage]
        worst.append(most - capacity)
    return worst


def fits(problem: Problem, rank: int, row: Sequence[Pass]) -> bool:
    """Whether one row stays within the memory of its rank."""
    during, after = _memory_tables(problem)
    current, capacity = 0.0, problem.capacity[rank]
    for kind, stage, _ in row:
        if current + during[kind][stage] > capacity:
            return False
        current += after[kind][stage]
    return True


def has_backward(row: Sequence[Pass]) -> bool:
    """Whether anything is kept for a backward pass."""
    return any(kind != 0 for kind, _, _ in row)


def _memory_tables(problem: Problem) -> tuple[tuple[Sequence[float], ...], tuple[Sequence[float], ...]]:
    kept, left = problem.kept, problem.kept_for_weight
    both = zip(kept, problem.forward_extra, strict=True)
    during = (
        tuple(one + other for one, other in both),
        problem.input_extra,
        problem.weight_extra,
        problem.backward_extra,
    )
    after = (
        kept,
        tuple(one - other for one, other in zip(left, kept, strict=True)),
        tuple(-one for one in left),
        tuple(-one for one in kept),
    )
    return during, after


def rows_of(schedule: Schedule) -> Rows:
    """What each rank computes, as numbers; passes that run together one after the other."""
    microbatches = schedule.microbatches
    rows: Rows = [[] for _ in range(schedule.ranks)]
    for rank, part in schedule.passes():
        number = part.stage * microbatches + (part.microbatch or 0)
        rows[rank].append((_NUMBER[part.kind], part.stage, number))
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
    """The schedule of rows of numbers."""
    actions = tuple(
        tuple(Action(stage, PASS_KINDS[kind], number - stage * microbatches) for kind, stage, number in row)
        for row in rows
    )
    return Schedule(name, stage_ranks, microbatches, actions)
