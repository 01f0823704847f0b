"""A list scheduler that knows times: whenever a rank is free, it chooses among what it could do.

I comes first, since the stage before waits for it; then F, as far as memory allows; W fills what is left.
What makes the difference is when a rank had better wait, because a gradient arrives before the F or W that it
could start now would end. A rank may wait

- as long as its idle time stays within a limit (`Rule.idle_s`), or
- where that I would otherwise be too late for the step to end in time (`Rule.target_s`)::

    rank r       F F F F . I W I F ...        . : waits for the I of rank r + 1, as F would end after it came
    rank r + 1   F F F I F I ...
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from partita.planning.actions import Action, ActionKind

__all__ = ["ListScheduler", "Outcome", "Problem", "Rule"]

_F, _I, _W = ActionKind.F, ActionKind.I, ActionKind.W
_Pass = tuple[ActionKind, int, int]
"""Kind, stage and microbatch."""


@dataclass(frozen=True)
class Problem:
    """What has to be scheduled: a chain of stages, each of which feeds the next.

    Attributes:
        stage_ranks: the rank of each stage.
        microbatches: how many a step has.
        forward_s: for each stage, seconds of F.
        input_s: for each stage, seconds of I.
        weight_s: for each stage, seconds of W.
        down_s: for each stage, seconds that its output travels to the next stage.
        up_s: for each stage, seconds that the gradient of its input travels to the stage before.
        kept: for each stage, what F takes of the rank's memory.
        kept_for_weight: for each stage, what of it I leaves to W.
        capacity: for each rank, how much memory there is for that.
    """

    stage_ranks: tuple[int, ...]
    microbatches: int
    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    down_s: tuple[float, ...]
    up_s: tuple[float, ...]
    kept: tuple[float, ...]
    kept_for_weight: tuple[float, ...]
    capacity: tuple[float, ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.stage_ranks)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.capacity)

    def work_s(self) -> list[float]:
        """For each rank, the seconds that it computes."""
        work = [0.0] * self.ranks
        for stage, rank in enumerate(self.stage_ranks):
            seconds = self.forward_s[stage] + self.input_s[stage] + self.weight_s[stage]
            work[rank] += self.microbatches * seconds
        return work

    def start_s(self) -> list[float]:
        """For each stage, when its first F can start at the earliest."""
        starts = [0.0]
        for stage in range(self.stages - 1):
            starts.append(starts[-1] + self.forward_s[stage] + self.down_s[stage])
        return starts


@dataclass(frozen=True)
class Rule:
    """When a rank waits for a gradient that is on its way, rather than start something else.

    Attributes:
        idle_s: it may, up to so many seconds in all.
        target_s: it does, where the step of the rank that is latest would otherwise take longer than this.
    """

    idle_s: float
    target_s: float = math.inf


@dataclass(frozen=True)
class Outcome:
    """A finished schedule.

    Attributes:
        passes: for each rank its passes, in order.
        span_s: the longest time of a rank from its first action's start to its last one's end.
        end_s: when the last action ends.
    """

    passes: tuple[tuple[_Pass, ...], ...]
    span_s: float
    end_s: float

    def actions(self) -> list[list[Action]]:
        """The passes as actions."""
        return [[Action(stage, kind, number) for kind, stage, number in row] for row in self.passes]


class ListScheduler:
    """Runs one `Rule` over a `Problem`. Each stage goes through its microbatches in order."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        stages, ranks = problem.stages, problem.ranks
        self._problem, self._rule = problem, rule
        # Later stages first: what they do lets memory go soonest, and has the longest way before it.
        self._own: list[list[int]] = [[] for _ in range(ranks)]
        for stage in reversed(range(stages)):
            self._own[problem.stage_ranks[stage]].append(stage)
        # An F leaves memory for one F of each later stage of its rank, or microbatches on their way round
        # would find none, and wait for ever for each other.
        self._claim = list(problem.kept)
        for own in self._own:
            for before, stage in pairwise(own):
                self._claim[stage] += self._claim[before]
        self._forward_at: list[deque[float]] = [deque() for _ in range(stages)]
        self._input_at: list[deque[float]] = [deque() for _ in range(stages)]
        self._forward_at[0].extend([0.0] * problem.microbatches)
        self._counts = {kind: [0] * stages for kind in (_F, _I, _W)}
        self._late: list[deque[int]] = [deque() for _ in range(ranks)]
        self._memory_left = list(problem.capacity)
        self._first_s: list[float | None] = [None] * ranks
        self._free_s = [0.0] * ranks
        self._idle_s = [0.0] * ranks
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._rows: list[list[_Pass]] = [[] for _ in range(ranks)]
        self._events: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
        self._deadlines = self._input_deadlines() if rule.target_s < math.inf else None

    def run(self) -> Outcome:
        """The schedule. Each rank has to have memory for one microbatch of all of its stages."""
        events = self._events
        while events:
            now_s, rank = heapq.heappop(events)
            if now_s < self._free_s[rank]:
                continue
            choice = self._choose(rank, now_s)
            if choice is not None:
                self._start(*choice, rank, now_s)
        done = sum(len(row) for row in self._rows)
        if done < 3 * self._problem.stages * self._problem.microbatches:
            raise AssertionError("unreachable: each rank has memory for one microbatch")
        spans = [end - (start or 0.0) for start, end in zip(self._first_s, self._free_s, strict=True)]
        return Outcome(tuple(map(tuple, self._rows)), max(spans), max(self._free_s))

    def _choose(self, rank: int, now_s: float) -> tuple[ActionKind, int] | None:
        """What the rank does next, or None to wait for what arrives next."""
        next_input_s, waiting = math.inf, -1
        for stage in self._own[rank]:
            arrivals = self._input_at[stage]
            if arrivals:
                if arrivals[0] <= now_s:
                    return _I, stage
                if arrivals[0] < next_input_s:
                    next_input_s, waiting = arrivals[0], stage
        next_forward_s = math.inf
        for stage in self._own[rank]:
            arrivals = self._forward_at[stage]
            if arrivals and self._claim[stage] <= self._memory_left[rank]:
                if arrivals[0] <= now_s:
                    end_s = now_s + self._problem.forward_s[stage]
                    waits = next_input_s < end_s and self._may_wait(rank, waiting, now_s, next_input_s, end_s)
                    return None if waits else (_F, stage)
                next_forward_s = min(next_forward_s, arrivals[0])
        if not self._late[rank]:
            return None
        stage = self._late[rank][0]
        end_s = now_s + self._problem.weight_s[stage]
        arrival_s = min(next_input_s, next_forward_s)
        if arrival_s < end_s and self._may_wait(rank, waiting, now_s, arrival_s, end_s):
            return None
        return _W, stage

    def _may_wait(self, rank: int, stage: int, now_s: float, until_s: float, end_s: float) -> bool:
        if self._first_s[rank] is None or self._idle_s[rank] + until_s - now_s <= self._rule.idle_s:
            return True
        if self._deadlines is None or stage < 0:
            return False
        return end_s + self._problem.input_s[stage] > self._deadlines[stage][self._counts[_I][stage]]

    def _start(self, kind: ActionKind, stage: int, rank: int, now_s: float) -> None:
        problem = self._problem
        number = self._counts[kind][stage]
        self._counts[kind][stage] += 1
        self._rows[rank].append((kind, stage, number))
        if self._first_s[rank] is None:
            self._first_s[rank] = now_s
        else:
            self._idle_s[rank] += now_s - self._free_s[rank]
        if kind is _F:
            end_s = now_s + problem.forward_s[stage]
            self._forward_at[stage].popleft()
            self._memory_left[rank] -= problem.kept[stage]
            if stage + 1 < problem.stages:
                self._send(self._forward_at, stage, stage + 1, end_s, problem.down_s[stage])
            else:
                self._input_at[stage].append(end_s)
        elif kind is _I:
            end_s = now_s + problem.input_s[stage]
            self._input_at[stage].popleft()
            self._memory_left[rank] += problem.kept[stage] - problem.kept_for_weight[stage]
            self._late[rank].append(stage)
            if stage:
                self._send(self._input_at, stage, stage - 1, end_s, problem.up_s[stage])
        else:
            end_s = now_s + problem.weight_s[stage]
            self._late[rank].popleft()
            self._memory_left[rank] += problem.kept_for_weight[stage]
        self._free_s[rank] = end_s
        heapq.heappush(self._events, (end_s, rank))

    def _send(
        self, arrivals: list[deque[float]], stage: int, target: int, end_s: float, travel_s: float
    ) -> None:
        here, there = self._problem.stage_ranks[stage], self._problem.stage_ranks[target]
        if here != there:
            end_s = max(end_s, self._link_free_s.get((here, there), 0.0)) + travel_s
            self._link_free_s[here, there] = end_s
        arrivals[target].append(end_s)
        heapq.heappush(self._events, (end_s, there))

    def _input_deadlines(self) -> list[list[float]]:
        """For each stage and microbatch, when I has to end for every rank to end in time.

        After it come the I's of later microbatches and their W's on its rank, and the same microbatch's way
        through the stages before.
        """
        problem = self._problem
        starts, deadlines = problem.start_s(), list[list[float]]()
        for stage in range(problem.stages):
            rank = problem.stage_ranks[stage]
            after = problem.input_s[stage] + problem.weight_s[stage]
            last_s = starts[min(self._own[rank])] + self._rule.target_s - problem.weight_s[stage]
            row = [last_s - left * after for left in reversed(range(problem.microbatches))]
            if stage:
                way_s = problem.input_s[stage - 1] + problem.up_s[stage]
                row = [min(own, before - way_s) for own, before in zip(row, deadlines[-1], strict=True)]
            deadlines.append(row)
        return deadlines
