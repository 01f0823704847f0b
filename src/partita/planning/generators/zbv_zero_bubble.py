"""ZB-V: a V of stages whose idle time is filled with gradients of weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from partita.planning.actions import Action, ActionKind
from partita.planning.generators._arguments import place_in_v
from partita.planning.generators._clock import Done, Rows
from partita.planning.schedule import Schedule

__all__ = ["zbv_zero_bubble"]

_F, _I, _W = ActionKind.F, ActionKind.I, ActionKind.W


def zbv_zero_bubble(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Rank r holds stages r and ``2 * ranks - 1 - r``; B is cut into I and W, and W fills what would be idle.

    The first rank has both ends of the pipeline, so it gets gradients back as soon as the first microbatch is
    through. A rank holds the activations of at most ``2 * ranks`` passes, which is as much memory as 1F1B
    needs on its first rank.

    (P. Qi et al., "Zero bubble pipeline parallelism", 2023, ZB-V.) Here a rule makes the schedule, for any
    number of microbatches. With F = I = W a rank idles for at most ``2 * ranks - 1`` passes in all the cases
    tested; no schedule gets below ``ranks - 1``, since the last rank waits so long for its first input.

    Args:
        stages: how many stages there are: two a rank.
        microbatches: how many a step has.
        ranks: how many ranks there are; half the stages where it is not given.
        placement: the rank of each stage; only this V will do.

    Raises:
        ScheduleError: not two stages a rank, another placement, or a number below 1.
    """
    stage_ranks = place_in_v("ZBVZeroBubble", stages, microbatches, ranks, placement)
    ranks = stages // 2
    workers = [_Worker(rank, ranks, microbatches) for rank in range(ranks)]
    return Schedule("ZBVZeroBubble", stage_ranks, microbatches, _run(workers, stages))


class _Worker:
    """One rank: what it has done, and the rule that says what it does next."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self._near, self._far = rank, 2 * ranks - 1 - rank
        self._microbatches = microbatches
        self._ranks = ranks
        self._count = {(kind, stage): 0 for kind in (_F, _I) for stage in (self._near, self._far)}
        self._late: deque[Action] = deque()
        self._held = {self._near: 0, self._far: 0}

    def choose(self, done: Done) -> Action | None:
        """The next action, or None to idle: I before F before W, the far stage before the near one."""
        for stage in (self._far, self._near):
            if self._possible(_I, stage, done):
                return self._take(_I, stage)
        for stage in (self._far, self._near):
            if self._possible(_F, stage, done) and self._has_room(stage):
                return self._take(_F, stage)
        if self._late:
            weight = self._late.popleft()
            self._held[weight.stage] -= 1
            return weight
        return None

    def _possible(self, kind: ActionKind, stage: int, done: Done) -> bool:
        number = self._count[kind, stage]
        return number < self._microbatches and done.allows(Action(stage, kind, number))

    def _has_room(self, stage: int) -> bool:
        """Whether one more forward pass keeps the rank within its memory.

        The far stage may always go on, since it is what lets the rank get rid of something. The near stage
        leaves it room for the microbatches that are on their way round the V.
        """
        if stage == self._far:
            return True
        return sum(self._held.values()) + self._on_the_way() + 2 <= 2 * self._ranks

    def _on_the_way(self) -> int:
        return self._count[_F, self._near] - self._count[_F, self._far]

    def _take(self, kind: ActionKind, stage: int) -> Action:
        number = self._count[kind, stage]
        self._count[kind, stage] += 1
        if kind is _F:
            self._held[stage] += 1
        else:
            self._late.append(Action(stage, _W, number))
        return Action(stage, kind, number)


def _run(workers: list[_Worker], stages: int) -> Rows:
    done = Done(stages)
    rows: list[list[Action | None]] = [[] for _ in workers]
    while True:
        tick = [worker.choose(done) for worker in workers]
        if not any(tick):
            return tuple(tuple(row) for row in rows)
        done.add(tick)
        for row, cell in zip(rows, tick, strict=True):
            row.append(cell)
