"""Schedules of a V that repeat a building block: the ticks at which one microbatch passes each rank.

A microbatch goes down the ranks, back up, and its gradient the same way; so it passes each rank four times.
Every six ticks another one starts. Four of six ticks of a rank are then taken, and W has the other two. A
rank holds a microbatch for as long as the block says, so the block determines the memory.

1. Repeat: the block for each microbatch, six ticks apart.
2. Warm up: until the first microbatch is through, a pass moves to the earliest free tick that memory allows.
3. Squeeze: every rank keeps its order and runs each pass as soon as it can. After its last F a rank needs
   no more memory, so from there it takes any I that has come, and W where none has.

(P. Qi et al., "Pipeline parallelism with controllable memory", 2024, sections 3 and 4.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import reduce
from itertools import count
from operator import or_

from partita.planning.generators.making.ticks import Rows, trimmed
from partita.planning.schedules.actions import Action, ActionKind

__all__ = ["BlockTicks", "v_rows"]

_PERIOD = 6
_NEAR_F, _FAR_F, _FAR_I, _NEAR_I, _FAR_W, _NEAR_W = range(6)
_KINDS = (ActionKind.F, ActionKind.F, ActionKind.I, ActionKind.I, ActionKind.W, ActionKind.W)
_LAST_QUEUES = ((_FAR_I,), (_NEAR_I,), (_FAR_W,), (_NEAR_W,))
"""In which order a rank looks for something to do when it has no F left."""
_Pass = tuple[int, int]
"""One of the six kinds above, and the microbatch."""


@dataclass(frozen=True)
class BlockTicks:
    """The ticks of the first microbatch on one rank.

    Attributes:
        near_forward: F of the rank's stage on the way down.
        far_forward: F of its stage on the way up.
        far_input: I of that stage.
        near_input: I of the first of the two.
    """

    near_forward: int
    far_forward: int
    far_input: int
    near_input: int

    def passes(self) -> tuple[int, int, int, int]:
        """All four, in the order of the kinds."""
        return (self.near_forward, self.far_forward, self.far_input, self.near_input)


def v_rows(block: list[BlockTicks], microbatches: int, most: int) -> Rows:
    """The rows of the schedule.

    Args:
        block: one a rank, such that no two passes fall on the same tick when it repeats.
        microbatches: how many a step has.
        most: how many passes a rank may have between F and W; at least as many as the repeated block has.
    """
    ends = [block[0].near_input]
    if microbatches < 2 * len(block):
        # Hardly a steady state: the whole step may be warmed up, where that takes less time.
        ends.append(block[0].near_input + _PERIOD * microbatches)
    candidates = []
    for end in ends:
        grid = [_Lane(ticks, microbatches, most, end) for ticks in block]
        _warm_up(grid, until=end)
        candidates.append(_Squeeze([lane.order() for lane in grid]).rows())
    return min(candidates, key=lambda rows: max(map(len, rows)))


class _Lane:
    """When one rank does what.

    A set of ticks is a number with a bit for each, so that what concerns a thousand ticks is one operation.
    How many more passes each tick has room for are such sets too: those whose number has the bit of 1, those
    whose number has the bit of 2, and so on.
    """

    def __init__(self, block: BlockTicks, microbatches: int, most: int, until: int) -> None:
        self.ticks: list[list[int]] = [
            [tick + _PERIOD * number for number in range(microbatches)] for tick in block.passes()
        ]
        taken = {tick for row in self.ticks for tick in row}
        self.ticks += [[], []]
        inputs = [(tick, _FAR_W) for tick in self.ticks[_FAR_I]] + [
            (tick, _NEAR_W) for tick in self.ticks[_NEAR_I]
        ]
        for tick, kind in sorted(inputs):
            free = next(later for later in count(tick + 1) if later not in taken)
            taken.add(free)
            self.ticks[kind].append(free)
        self._taken = sum(1 << tick for tick in taken if tick < until)
        self._rooms = [_from_to(0, until) * (most >> bit & 1) for bit in range(most.bit_length())]
        for forward, weight in ((_NEAR_F, _NEAR_W), (_FAR_F, _FAR_W)):
            for start, end in zip(self.ticks[forward], self.ticks[weight], strict=True):
                self._hold(min(start, until), min(end, until))

    def advance(self, kind: int, number: int, earliest: int) -> None:
        """Move a pass to the first free tick from `earliest` on, as far as memory allows."""
        here = self.ticks[kind][number]
        if kind in (_NEAR_F, _FAR_F):
            full = _from_to(earliest, here) & ~reduce(or_, self._rooms)
            earliest = max(earliest, full.bit_length())
        free = _from_to(earliest, here) & ~self._taken
        if not free:
            return
        first = free & -free
        tick = first.bit_length() - 1
        self._taken ^= first | 1 << here
        self.ticks[kind][number] = tick
        if kind in (_NEAR_F, _FAR_F):
            self._hold(tick, here)
        elif kind in (_FAR_W, _NEAR_W):
            self._release(tick, here)

    def _hold(self, start: int, end: int) -> None:
        borrow = _from_to(start, end)
        for bit, ticks in enumerate(self._rooms):
            self._rooms[bit] = ticks ^ borrow
            borrow &= ~ticks

    def _release(self, start: int, end: int) -> None:
        carry = _from_to(start, end)
        for bit, ticks in enumerate(self._rooms):
            self._rooms[bit] = ticks ^ carry
            carry &= ticks

    def order(self) -> list[_Pass]:
        """The passes by tick."""
        return [
            (kind, number)
            for _, kind, number in sorted(
                (tick, kind, number) for kind, row in enumerate(self.ticks) for number, tick in enumerate(row)
            )
        ]


def _from_to(start: int, end: int) -> int:
    """The set of the ticks from `start` until `end`."""
    return max(0, (1 << end) - (1 << start))


def _warm_up(grid: list[_Lane], until: int) -> None:
    early = sorted(
        (tick, rank, kind, number)
        for rank, lane in enumerate(grid)
        for kind, row in enumerate(lane.ticks)
        for number, tick in enumerate(row)
        if tick < until
    )
    for _, rank, kind, number in early:
        needs = [grid[at].ticks[needed][number] for at, needed in _needs(rank, kind, len(grid))]
        if number:
            needs.append(grid[rank].ticks[kind][number - 1])
        grid[rank].advance(kind, number, max(needs, default=-1) + 1)


def _needs(rank: int, kind: int, ranks: int) -> list[tuple[int, int]]:
    """The ranks and kinds of the passes that a pass takes something from."""
    if kind in (_FAR_W, _NEAR_W):
        return [(rank, _FAR_I if kind == _FAR_W else _NEAR_I)]
    before = rank - 1 if kind in (_NEAR_F, _FAR_I) else rank + 1
    if 0 <= before < ranks:
        own = [(rank, _FAR_F if kind == _FAR_I else _NEAR_F)] if kind in (_FAR_I, _NEAR_I) else []
        return [(before, kind), *own]
    return [(rank, kind - 1)] if kind else []  # the turn of the V


class _Squeeze:
    """Runs the orders tick by tick."""

    def __init__(self, orders: list[list[_Pass]]) -> None:
        self._ranks = len(orders)
        self._needs = [[_needs(rank, kind, self._ranks) for kind in range(6)] for rank in range(self._ranks)]
        self._done = [[0] * 6 for _ in orders]  # for each rank and kind, how many microbatches are through
        # Up to its last F each rank keeps its order. What is left then is I by stage, and W.
        ends = [
            max(at for at, (kind, _) in enumerate(order) if kind in (_NEAR_F, _FAR_F)) for order in orders
        ]
        self._ordered = [deque(order[: end + 1]) for order, end in zip(orders, ends, strict=True)]
        self._last = [
            [deque(one for one in order[end + 1 :] if one[0] in kinds) for kinds in _LAST_QUEUES]
            for order, end in zip(orders, ends, strict=True)
        ]

    def rows(self) -> Rows:
        rows: list[list[Action | None]] = [[] for _ in range(self._ranks)]
        while any(self._ordered) or any(map(any, self._last)):
            tick = [self._take(rank) for rank in range(self._ranks)]
            for rank, taken in enumerate(tick):
                rows[rank].append(None if taken is None else self._action(rank, *taken))
                if taken is not None:
                    self._done[rank][taken[0]] += 1
        return tuple(tuple(trimmed(row)) for row in rows)

    def _take(self, rank: int) -> _Pass | None:
        for queue in (self._ordered[rank],) if self._ordered[rank] else self._last[rank]:
            if queue and self._ready(rank, *queue[0]):
                return queue.popleft()
        return None

    def _ready(self, rank: int, kind: int, number: int) -> bool:
        return all(self._done[at][needed] > number for at, needed in self._needs[rank][kind])

    def _action(self, rank: int, kind: int, number: int) -> Action:
        stage = 2 * self._ranks - 1 - rank if kind in (_FAR_F, _FAR_I, _FAR_W) else rank
        return Action(stage, _KINDS[kind], number)
