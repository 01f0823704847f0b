"""How much memory each rank of a step holds: at most, and over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from partita.planning.costs.stage_cost import StageCost
from partita.planning.schedules.actions import PASS_KINDS, PASS_NUMBERS, Action, ActionKind
from partita.planning.schedules.schedule import Schedule
from partita.planning.simulating.message_sizes import handed_beside, handed_on_ranks, message_sizes
from partita.planning.simulating.messages import messages_beside
from partita.planning.simulating.span import Span

__all__ = ["MemoryStep", "memory_over_time", "peak_bytes"]

_BACKWARD = (ActionKind.I, ActionKind.B)


class MemoryStep(NamedTuple):
    """From `time_s` until the next step, a rank holds so many `bytes`."""

    time_s: float
    bytes: int


def peak_bytes(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[int, ...]:
    """The most memory that each rank holds. Its actions come one by one, so time does not matter."""
    current = _static_bytes(schedule.stage_ranks, schedule.ranks, costs)
    most = list(current)
    trains = schedule.has_backward
    uses = {
        kind: [(cost.bytes_during(kind), cost.bytes_after(kind)) for cost in costs] for kind in PASS_KINDS
    }
    passes = list(schedule.passes())
    for (rank, part), messages in zip(passes, _messages(passes, costs, schedule.stage_ranks), strict=True):
        during, after = uses[part.kind][part.stage]
        now = current[rank] + messages
        if now + during > most[rank]:
            most[rank] = now + during
        if trains:
            current[rank] += after
    return tuple(most)


def memory_over_time(
    spans: Sequence[Span], costs: Sequence[StageCost], stage_ranks: Sequence[int], ranks: int
) -> tuple[tuple[MemoryStep, ...], ...]:
    """For each rank, how much it holds from when on, from the start of the step to its end.

    While a pass runs, its rank holds what the pass needs at most, workspaces and what is computed again
    included; from its end on, what stays. Of the parts of an OVERLAP_F_B, which run together, one is counted
    after the other, as in `peak_bytes`.

    Args:
        spans: the passes; those of a rank in its order.
        costs: one a stage.
        stage_ranks: the rank of each stage.
        ranks: how many ranks there are.
    """
    current = _static_bytes(stage_ranks, ranks, costs)
    steps = [[MemoryStep(0.0, size)] for size in current]
    trains = any(part.kind is not ActionKind.F for span in spans for part in span.action.passes)
    passes = [(span.rank, part) for span in spans for part in span.action.passes]
    messages = iter(_messages(passes, costs, stage_ranks))
    for span in spans:
        most, after = _over(span.action, current[span.rank], costs, messages, trains)
        current[span.rank] = after
        _append(steps[span.rank], span.start_s, most)
        _append(steps[span.rank], span.end_s, after)
    return tuple(map(tuple, steps))


def _messages(
    passes: Sequence[tuple[int, Action]], costs: Sequence[StageCost], stage_ranks: Sequence[int]
) -> list[int]:
    """What lies on its rank for messages beside each pass; those of a rank are in its order."""
    of_sizes = message_sizes(costs, stage_ranks)
    handed = handed_on_ranks(costs, stage_ranks)
    if not any(handed) and not any(of_sizes.coming.values()) and not any(of_sizes.sent.values()):
        return [0] * len(passes)
    of_rank: dict[int, list[int]] = {rank: [] for rank in range(max(stage_ranks) + 1)}
    for number, (rank, _) in enumerate(passes):
        of_rank[rank].append(number)
    rows = [
        [(PASS_NUMBERS[it.kind], it.stage, it.microbatch or 0) for _, it in map(passes.__getitem__, numbers)]
        for numbers in of_rank.values()
    ]
    trains = any(part.kind in _BACKWARD for _, part in passes)
    beside = messages_beside(rows, stage_ranks, of_sizes.coming)
    sizes = [0] * len(passes)
    for rank, numbers in enumerate(of_rank.values()):
        waiting = handed_beside(rows[rank], handed[rank] if trains else ())
        lying = of_sizes.beside(beside[rank], len(numbers))
        for number, messages, size in zip(numbers, lying, waiting, strict=True):
            sizes[number] = messages + size
    return sizes


def _over(
    action: Action, now: int, costs: Sequence[StageCost], messages: Iterator[int], trains: bool
) -> tuple[int, int]:
    """The most that a rank holds during an action, and what it holds after it."""
    most = now
    for part in action.passes:
        most = max(most, now + costs[part.stage].bytes_during(part.kind) + next(messages))
        if trains:
            now += costs[part.stage].bytes_after(part.kind)
    return max(most, now), now


def _append(steps: list[MemoryStep], time_s: float, size: int) -> None:
    """Add a step, unless nothing changes. One that takes no time stays, for it may be the peak."""
    if steps[-1].bytes != size:
        steps.append(MemoryStep(time_s, size))


def _static_bytes(stage_ranks: Sequence[int], ranks: int, costs: Sequence[StageCost]) -> list[int]:
    static = [0] * ranks
    for rank, cost in zip(stage_ranks, costs, strict=True):
        static[rank] += cost.static_bytes
    return static
