"""ZB-V: a V of stages whose idle time is filled with gradients of weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from partita.planning.generators.making.arguments import place_in_v
from partita.planning.generators.making.ticks import Done, Rows, laid_out
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.schedule import Schedule

__all__ = ["zbv_zero_bubble"]

_F, _I, _W = ActionKind.F, ActionKind.I, ActionKind.W


def zbv_zero_bubble(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Rank r holds stages r and ``2 * ranks - 1 - r``; B is cut into I and W, and W fills what would be idle.

    The first rank has both ends of the pipeline, so it gets gradients back as soon as the first microbatch is
    through. A rank holds the activations of at most ``2 * ranks`` passes, which is as much memory as 1F1B
    needs on its first rank. Once a rank is warm, it does F, I and W of one stage, then of the other. So a
    message has the time of a W to arrive in, and links and passes that take a little longer cost next to
    nothing::

        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 ...      (rank 0 of 2)

    (P. Qi et al., "Zero bubble pipeline parallelism", 2023, ZB-V.) With F = I = W a rank idles for
    ``ranks - 1`` passes, which is the least that can be, since the last rank waits so long for its first
    input. With fewer than ``2 * ranks - 1`` microbatches nothing gets warm, and a rule makes the schedule: I
    before F before W.

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
    if microbatches < 2 * ranks - 1:
        rows = _run([_Worker(rank, ranks, microbatches) for rank in range(ranks)], stages)
    else:
        queues = [[_Row(rank, ranks, microbatches).actions()] for rank in range(ranks)]
        rows = laid_out(queues, stages, "ZBVZeroBubble")
    return Schedule("ZBVZeroBubble", stage_ranks, microbatches, rows)


class _Row:
    """What one rank does, from the way that microbatches take through the V."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self._near, self._far = rank, 2 * ranks - 1 - rank
        self._rank, self._ranks, self._microbatches = rank, ranks, microbatches
        self._count = {(kind, stage): 0 for kind in (_F, _I, _W) for stage in (self._near, self._far)}
        self._row: list[Action] = []

    def actions(self) -> list[Action]:
        """All of them, in order."""
        near, far, below = self._near, self._far, self._ranks - self._rank
        self._take(_F, near, times=2 * below - 1)  # until the first microbatch comes back
        for _ in range(self._rank):
            self._take(_F, far)
            self._take(_F, near)
        for _ in range(below):  # until its gradient comes back
            self._round(far)
        while min(self._count[_F, near], self._count[_F, far]) < self._microbatches:
            self._round(near)
            self._round(far)
        if self._rank and self._row[-1].kind is _W:  # it keeps no F waiting, and the ranks below wait for I
            self._count[_W, self._row.pop().stage] -= 1
        for _ in range(self._rank):  # the ranks below wait for gradients
            self._take(_I, near)
            self._take(_I, far)
        while min(self._count[_I, near], self._count[_I, far]) < self._microbatches:
            self._take(_I, near if self._count[_I, near] < self._microbatches else far)
            self._take_oldest_weight()
        while self._take_oldest_weight():
            pass
        return self._row

    def _round(self, stage: int) -> None:
        for kind in (_F, _I, _W):
            self._take(kind, stage)

    def _take(self, kind: ActionKind, stage: int, times: int = 1) -> None:
        """The next ones of a kind, as far as there are any."""
        before = {_F: self._microbatches, _I: self._count[_F, stage], _W: self._count[_I, stage]}[kind]
        start = self._count[kind, stage]
        end = self._count[kind, stage] = min(start + times, before)
        self._row += [Action(stage, kind, number) for number in range(start, end)]

    def _take_oldest_weight(self) -> bool:
        waiting = [
            stage for stage in (self._near, self._far) if self._count[_W, stage] < self._count[_I, stage]
        ]
        if waiting:
            self._take(_W, min(waiting, key=lambda stage: self._count[_W, stage]))
        return bool(waiting)


class _Worker:
    """One rank: what it has done, and the rule that says what it does next."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self._near, self._far = rank, 2 * ranks - 1 - rank
        self._microbatches = microbatches
        self._ranks = ranks
        self._count = {(kind, stage): 0 for kind in (_F, _I) for stage in (self._near, self._far)}
        self._late: deque[Action] = deque()
        self._in_flight = {self._near: 0, self._far: 0}

    def choose(self, done: Done) -> Action | None:
        """The next action, or None to idle: I before F before W, the far stage before the near one."""
        for stage in (self._far, self._near):
            if self._possible(_I, stage, done):
                return self._take(_I, stage)
        for stage in (self._far, self._near):
            if self._possible(_F, stage, done) and self._fits(stage):
                return self._take(_F, stage)
        if self._late:
            weight = self._late.popleft()
            self._in_flight[weight.stage] -= 1
            return weight
        return None

    def _possible(self, kind: ActionKind, stage: int, done: Done) -> bool:
        number = self._count[kind, stage]
        return number < self._microbatches and done.allows(Action(stage, kind, number))

    def _fits(self, stage: int) -> bool:
        """Whether one more forward pass keeps the rank within its memory.

        The far stage may always go on, since it is what lets the rank get rid of something. The near stage
        leaves it room for the microbatches that are on their way round the V.
        """
        if stage == self._far:
            return True
        return sum(self._in_flight.values()) + self._on_the_way() + 2 <= 2 * self._ranks

    def _on_the_way(self) -> int:
        return self._count[_F, self._near] - self._count[_F, self._far]

    def _take(self, kind: ActionKind, stage: int) -> Action:
        number = self._count[kind, stage]
        self._count[kind, stage] += 1
        if kind is _F:
            self._in_flight[stage] += 1
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
