"""Lay queues of actions out on a common clock: at each tick a rank does one that can run, or idles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partita.errors import ScheduleError
from partita.planning.schedules.actions import Action, ActionKind

__all__ = ["Done", "Rows", "forwards", "laid_out", "trimmed"]

Rows = tuple[tuple[Action | None, ...], ...]

_ORDER = {ActionKind.B: 0, ActionKind.I: 0, ActionKind.OVERLAP_F_B: 0, ActionKind.F: 1, ActionKind.W: 2}


class Done:
    """What has been computed so far, for a chain of stages, each of which feeds the next."""

    def __init__(self, stages: int) -> None:
        self._last = stages - 1
        self._forward: set[tuple[int, int | None]] = set()
        self._backward: set[tuple[int, int | None]] = set()

    def allows(self, action: Action) -> bool:
        """Whether everything that `action` takes is there."""
        return all(self._allows(part) for part in action.passes)

    def _allows(self, part: Action) -> bool:
        stage, microbatch = part.stage, part.microbatch
        if part.kind is ActionKind.F:
            return stage == 0 or (stage - 1, microbatch) in self._forward
        if part.kind is ActionKind.W:
            return (stage, microbatch) in self._backward
        below = stage == self._last or (stage + 1, microbatch) in self._backward
        return below and (stage, microbatch) in self._forward

    def add(self, actions: Iterable[Action | None]) -> None:
        """Note that `actions` are computed."""
        for action in actions:
            for part in () if action is None else action.passes:
                if part.kind is ActionKind.F:
                    self._forward.add((part.stage, part.microbatch))
                elif part.kind is not ActionKind.W:
                    self._backward.add((part.stage, part.microbatch))


def forwards(stage: int, microbatches: int) -> list[Action]:
    """The forward passes of one stage in order."""
    return [Action(stage, ActionKind.F, microbatch) for microbatch in range(microbatches)]


def laid_out(queues: Sequence[Sequence[Sequence[Action]]], stages: int, name: str) -> Rows:
    """One row a rank from the queues of each rank; ScheduleError where they wait for each other for ever.

    Each queue keeps its order. Among the heads that can run, a rank takes a backward pass before a forward
    pass, then the earlier microbatch, then the later stage, so that what is under way gets finished first::

        rank 0   0F0 0F1  .  0B0  .  0B1
        rank 1    .  1F0 1B0 1F1 1B1
    """
    done = Done(stages)
    heads = [[0] * len(of_rank) for of_rank in queues]
    rows: list[list[Action | None]] = [[] for _ in queues]
    left = sum(len(queue) for of_rank in queues for queue in of_rank)
    while left:
        tick: list[Action | None] = []
        for rank, of_rank in enumerate(queues):
            ready = [
                (action, index)
                for index, queue in enumerate(of_rank)
                if heads[rank][index] < len(queue) and done.allows(action := queue[heads[rank][index]])
            ]
            if not ready:
                tick.append(None)
                continue
            action, index = min(ready, key=_urgency)
            heads[rank][index] += 1
            tick.append(action)
        taken = len(tick) - tick.count(None)
        if not taken:
            raise ScheduleError(
                f"{name} with {stages} stages on {len(queues)} ranks stalls: take another schedule"
            )
        left -= taken
        done.add(tick)
        for row, cell in zip(rows, tick, strict=True):
            row.append(cell)
    return tuple(tuple(trimmed(row)) for row in rows)


def _urgency(ready: tuple[Action, int]) -> tuple[int, int, int]:
    first = ready[0].passes[0]
    return (_ORDER[ready[0].kind], first.microbatch or 0, -first.stage)


def trimmed(row: list[Action | None]) -> list[Action | None]:
    """`row` without the idle ticks at its end."""
    while row and row[-1] is None:
        row.pop()
    return row
