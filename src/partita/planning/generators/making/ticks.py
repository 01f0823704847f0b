"""Lay queues of actions out on a common clock: at each tick a rank does one that can run, or idles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partita.errors import ScheduleError
from partita.planning.schedules.actions import Action, ActionKind

__all__ = ["Done", "Rows", "forwards", "laid_out", "trimmed"]

Rows = tuple[tuple[Action | None, ...], ...]

_ORDER = {ActionKind.B: 0, ActionKind.I: 0, ActionKind.OVERLAP_F_B: 0, ActionKind.F: 1, ActionKind.W: 2}


_Key = tuple[bool, int, int | None]
"""Whether it is a gradient, the stage that it comes from, the microbatch."""


class Done:
    """What has been computed so far, for a chain of stages, each of which feeds the next."""

    def __init__(self, stages: int) -> None:
        self._last = stages - 1
        self._keys: set[_Key] = set()

    def allows(self, action: Action) -> bool:
        """Whether everything that `action` takes is there."""
        return self.missing(action) is None

    def missing(self, action: Action) -> _Key | None:
        """Something that `action` takes and that is not there yet."""
        for part in action.parts or (action,):
            stage, microbatch = part.stage, part.microbatch
            if part.kind is ActionKind.F:
                needs: tuple[_Key, ...] = ((False, stage - 1, microbatch),) if stage else ()
            elif part.kind is ActionKind.W:
                needs = ((True, stage, microbatch),)
            elif stage == self._last:
                needs = ((False, stage, microbatch),)
            else:
                needs = ((True, stage + 1, microbatch), (False, stage, microbatch))
            for key in needs:
                if key not in self._keys:
                    return key
        return None

    def add(self, actions: Iterable[Action | None]) -> list[_Key]:
        """Note that `actions` are computed; what is there now and was not before."""
        new: list[_Key] = []
        for action in actions:
            passes = () if action is None else action.passes
            new += [
                (part.kind is not ActionKind.F, part.stage, part.microbatch)
                for part in passes
                if part.kind is not ActionKind.W
            ]
        self._keys.update(new)
        return new


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
    heads = _Heads(queues, stages)
    rows: list[list[Action | None]] = [[] for _ in queues]
    left = sum(len(queue) for of_rank in queues for queue in of_rank)
    tick = 0
    while left:
        taken = heads.take()
        if not taken:
            raise ScheduleError(
                f"{name} with {stages} stages on {len(queues)} ranks stalls: take another schedule"
            )
        for rank, action in taken:
            row = rows[rank]
            row += [None] * (tick - len(row))
            row.append(action)
        left -= len(taken)
        tick += 1
    return tuple(map(tuple, rows))


class _Heads:
    """The first action of each queue: those that can run, by rank, and by what is missing those that can't.

    So a tick looks at the ranks that have something to do, and not at those that wait.
    """

    def __init__(self, queues: Sequence[Sequence[Sequence[Action]]], stages: int) -> None:
        self._queues = queues
        self._done = Done(stages)
        self._next = [[0] * len(of_rank) for of_rank in queues]
        self._ready: dict[int, list[tuple[Action, int]]] = {}
        self._waiting: dict[_Key, list[tuple[int, int]]] = {}
        for rank, of_rank in enumerate(queues):
            for index in range(len(of_rank)):
                self._look(rank, index)

    def take(self) -> list[tuple[int, Action]]:
        """The most urgent action of each rank that has one, which is thereby done."""
        taken: list[tuple[int, Action]] = []
        changed: list[tuple[int, int]] = []
        for rank, ready in list(self._ready.items()):
            head = ready[0] if len(ready) == 1 else min(ready, key=_urgency)
            ready.remove(head)
            if not ready:
                del self._ready[rank]
            action, index = head
            self._next[rank][index] += 1
            changed.append((rank, index))
            taken.append((rank, action))
        for key in self._done.add(action for _, action in taken):
            changed += self._waiting.pop(key, ())
        for rank, index in changed:
            self._look(rank, index)
        return taken

    def _look(self, rank: int, index: int) -> None:
        queue, position = self._queues[rank][index], self._next[rank][index]
        if position == len(queue):
            return
        missing = self._done.missing(queue[position])
        if missing is None:
            self._ready.setdefault(rank, []).append((queue[position], index))
        else:
            self._waiting.setdefault(missing, []).append((rank, index))


def _urgency(ready: tuple[Action, int]) -> tuple[int, int, int, int]:
    action, index = ready
    first = action.passes[0]
    return (_ORDER[action.kind], first.microbatch or 0, -first.stage, index)


def trimmed(row: list[Action | None]) -> list[Action | None]:
    """`row` without the idle ticks at its end."""
    while row and row[-1] is None:
        row.pop()
    return row
