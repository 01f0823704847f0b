"""A list scheduler that knows times: whenever a rank is free, it chooses among what it could do.

I comes first, since the stage before waits for it; then F, as far as memory allows; W fills what is left.
What makes the difference is when a rank had better wait, because a gradient arrives before the F or W that it
could start now would end. A rank may wait

- as long as its idle time stays within a limit (`Rule.idle_s`), or
- where that I would otherwise be too late for the step to end in time (`Rule.target_s`)::

    rank r       F F F F . I W I F ...        . : waits for the I of rank r + 1, as F would end after it came
    rank r + 1   F F F I F I ...

Or, where a schedule is to be made better, it goes by `Tails`: what has the longest way before it in that
schedule comes first.

Memory: an F starts only if its rank can afterwards still hold what one microbatch takes on its way through
the later stages of the rank, and what any backward pass needs while it runs. So whatever was begun can end.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita.planning.generators.making.problem import Problem
from partita.planning.schedules.actions import Action, ActionKind

__all__ = ["ListScheduler", "Outcome", "Rule", "Rules", "Tails", "least_capacity"]

_SAME = 1e-9
_F, _I, _W, _B = ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B
_Pass = tuple[ActionKind, int, int]
"""Kind, stage and microbatch."""


@dataclass(frozen=True)
class Tails:
    """What comes first: the pass from which the way to the end of the step is longest.

    Attributes:
        seconds: for F, I (or B) and W, by ``stage * microbatches + microbatch``: from the start of the pass
            to the end of the step.
        wait: a rank waits for a pass with a longer way where that is there within so many times what it
            could start now takes.
    """

    seconds: tuple[Sequence[float], Sequence[float], Sequence[float]]
    wait: float


@dataclass(frozen=True)
class Rule:
    """When a rank waits for a gradient that is on its way, rather than start something else.

    Attributes:
        idle_s: it may, up to so many seconds in all.
        target_s: it does, where the step of the rank that is latest would otherwise take longer than this.
        tails: what comes first; I before F before W where it is not given.
        whole: the stages whose backward pass is not cut in two: B in place of I and W.
    """

    idle_s: float
    target_s: float = math.inf
    tails: Tails | None = None
    whole: frozenset[int] = frozenset()


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
        self._needs: dict[int, float] = {}
        self._claim: dict[int, float] = {}
        for own in self._own:
            needs = _needs(problem, own, rule.whole)
            self._needs |= needs
            self._claim |= _claims(problem, own, needs)
        whole = rule.whole
        self._input_s = [
            problem.whole_s[stage] if stage in whole else problem.input_s[stage] for stage in range(stages)
        ]
        self._weight_s = [0.0 if stage in whole else problem.weight_s[stage] for stage in range(stages)]
        self._forward_at: list[deque[float]] = [deque() for _ in range(stages)]
        self._input_at: list[deque[float]] = [deque() for _ in range(stages)]
        self._forward_at[0].extend([0.0] * problem.microbatches)
        # How many of each stage's F, I or B, and W have started.
        self._forwards, self._inputs, self._weights = ([0] * stages for _ in range(3))
        self._late: list[deque[int]] = [deque() for _ in range(ranks)]
        self._memory_left = list(problem.capacity)
        self._first_s: list[float | None] = [None] * ranks
        self._free_s = [0.0] * ranks
        self._idle_s = [0.0] * ranks
        self._longest_wait_s, self._shortest_refused_s = 0.0, math.inf
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._rows: list[list[_Pass]] = [[] for _ in range(ranks)]
        self._events: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
        self._deadlines = self._input_deadlines() if rule.target_s < math.inf else None

    def run(self) -> Outcome:
        """The schedule. Each rank has to have the memory that `least_capacity` says."""
        outcome = self.run_within(math.inf)
        if outcome is None:
            raise AssertionError("unreachable: nothing takes for ever")
        return outcome

    def run_within(self, span_s: float) -> Outcome | None:
        """The same, given up as soon as a rank has idled so much that its span takes longer than that."""
        events, idle_s = self._events, self._idle_s
        most_idle_s = [span_s * (1 + _SAME) - work_s for work_s in self._work_s()]
        choose = self._choose if self._rule.tails is None else self._choose_by_tails
        while events:
            now_s, rank = heapq.heappop(events)
            if now_s < self._free_s[rank]:
                continue
            choice = choose(rank, now_s)
            if choice is not None:
                self._start(*choice, rank, now_s)
                if idle_s[rank] > most_idle_s[rank]:
                    return None
        done = sum(len(row) for row in self._rows)
        problem = self._problem
        if done < (3 * problem.stages - len(self._rule.whole)) * problem.microbatches:
            raise AssertionError("unreachable: each rank has memory for one microbatch")
        spans = [end - (start or 0.0) for start, end in zip(self._first_s, self._free_s, strict=True)]
        return Outcome(tuple(map(tuple, self._rows)), max(spans), max(self._free_s))

    @property
    def equal_limits_s(self) -> tuple[float, float]:
        """After a run: with any `Rule.idle_s` from the first on and below the second it would be the same."""
        return self._longest_wait_s, self._shortest_refused_s

    def _work_s(self) -> list[float]:
        """For each rank, the seconds that it computes."""
        of_stages = zip(self._problem.forward_s, self._input_s, self._weight_s, strict=True)
        a_microbatch = [sum(of_one) for of_one in of_stages]
        return [self._problem.microbatches * sum(map(a_microbatch.__getitem__, own)) for own in self._own]

    def _choose(self, rank: int, now_s: float) -> tuple[ActionKind, int] | None:
        """What the rank does next, or None to wait for what arrives next."""
        next_input_s, waiting = math.inf, -1
        memory_left = self._memory_left[rank]
        for stage in self._own[rank]:
            arrivals = self._input_at[stage]
            if arrivals and self._needs[stage] <= memory_left:
                if arrivals[0] <= now_s:
                    return _I, stage
                if arrivals[0] < next_input_s:
                    next_input_s, waiting = arrivals[0], stage
        next_forward_s = math.inf
        for stage in self._own[rank]:
            arrivals = self._forward_at[stage]
            if arrivals and self._claim[stage] <= memory_left:
                if arrivals[0] <= now_s:
                    end_s = now_s + self._problem.forward_s[stage]
                    waits = next_input_s < end_s and self._may_wait(rank, waiting, now_s, next_input_s, end_s)
                    return None if waits else (_F, stage)
                next_forward_s = min(next_forward_s, arrivals[0])
        if not self._late[rank]:
            return None
        stage = self._late[rank][0]
        end_s = now_s + self._weight_s[stage]
        arrival_s = min(next_input_s, next_forward_s)
        if arrival_s < end_s and self._may_wait(rank, waiting, now_s, arrival_s, end_s):
            return None
        return _W, stage

    def _choose_by_tails(self, rank: int, now_s: float) -> tuple[ActionKind, int] | None:
        """Of what is there the pass with the longest tail, unless a longer one is about to come."""
        tails = self._rule.tails
        if tails is None:
            raise AssertionError("unreachable: the rule has tails")
        forward, backward, weight = tails.seconds
        problem, memory_left = self._problem, self._memory_left[rank]
        ready: tuple[float, ActionKind, int] | None = None
        coming: list[tuple[float, float]] = []
        for stage in self._own[rank]:
            first = stage * problem.microbatches
            for kind, arrivals, needs, by_pass, counts in (
                (_I, self._input_at[stage], self._needs[stage], backward, self._inputs),
                (_F, self._forward_at[stage], self._claim[stage], forward, self._forwards),
            ):
                if arrivals and needs <= memory_left:
                    tail_s = by_pass[first + counts[stage]]
                    if arrivals[0] > now_s:
                        coming.append((tail_s, arrivals[0]))
                    elif ready is None or tail_s > ready[0]:
                        ready = (tail_s, kind, stage)
            if stage not in self._rule.whole and self._weights[stage] < self._inputs[stage]:
                tail_s = weight[first + self._weights[stage]]
                if ready is None or tail_s > ready[0]:
                    ready = (tail_s, _W, stage)
        if ready is None:
            return None
        tail_s, kind, stage = ready
        takes_s = problem.forward_s if kind is _F else self._input_s if kind is _I else self._weight_s
        until_s = now_s + tails.wait * takes_s[stage]
        # What is waited for has to come before that would end, and must gain more than is lost by waiting.
        for other_s, arrival_s in coming:
            if arrival_s < until_s and other_s - tail_s > arrival_s - now_s:
                return None
        return kind, stage

    def _may_wait(self, rank: int, stage: int, now_s: float, until_s: float, end_s: float) -> bool:
        if self._first_s[rank] is None:
            return True
        idle_s = self._idle_s[rank] + until_s - now_s
        if idle_s <= self._rule.idle_s:
            self._longest_wait_s = max(self._longest_wait_s, idle_s)
            return True
        self._shortest_refused_s = min(self._shortest_refused_s, idle_s)
        if self._deadlines is None or stage < 0:
            return False
        return end_s + self._input_s[stage] > self._deadlines[stage][self._inputs[stage]]

    def _start(self, kind: ActionKind, stage: int, rank: int, now_s: float) -> None:
        problem = self._problem
        counts = self._forwards if kind is _F else self._inputs if kind is _I else self._weights
        number = counts[stage]
        counts[stage] = number + 1
        whole = kind is _I and stage in self._rule.whole
        self._rows[rank].append((_B if whole else kind, stage, number))
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
            end_s = now_s + self._input_s[stage]
            self._input_at[stage].popleft()
            self._memory_left[rank] += problem.kept[stage]
            if not whole:
                self._memory_left[rank] -= problem.kept_for_weight[stage]
                self._late[rank].append(stage)
            if stage:
                self._send(self._input_at, stage, stage - 1, end_s, problem.up_s[stage])
        else:
            end_s = now_s + self._weight_s[stage]
            self._late[rank].remove(stage)
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
            after = self._input_s[stage] + self._weight_s[stage]
            last_s = starts[min(self._own[rank])] + self._rule.target_s - self._weight_s[stage]
            row = [last_s - left * after for left in reversed(range(problem.microbatches))]
            if stage:
                way_s = self._input_s[stage - 1] + problem.up_s[stage]
                row = [min(own, before - way_s) for own, before in zip(row, deadlines[-1], strict=True)]
            deadlines.append(row)
        return deadlines


class Rules:
    """Runs rules over a problem, each schedule once: limits of idle time that differ may mean the same."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._equal_limits_s: dict[Rule, list[tuple[float, float]]] = {}

    def run(self, rule: Rule, span_s: float = math.inf) -> Outcome | None:
        """The rule's schedule, as `ListScheduler.run_within` gives it; None where it has been made before.

        Args:
            rule: one without tails.
            span_s: no more than in the runs before, or else what was given up then is not made now.
        """
        limits = self._equal_limits_s.setdefault(replace(rule, idle_s=0.0), [])
        if any(least_s <= rule.idle_s < most_s for least_s, most_s in limits):
            return None
        scheduler = ListScheduler(self._problem, rule)
        outcome = scheduler.run_within(span_s)
        limits.append(scheduler.equal_limits_s)
        return outcome


def _needs(problem: Problem, own: Sequence[int], whole: frozenset[int]) -> dict[int, float]:
    """For each stage of a rank, the memory that has to be left for its I or B to start.

    I may leave more to W than was kept, and W has to find room after it.
    """
    for_weight = max((problem.weight_extra[stage] for stage in own if stage not in whole), default=0)
    needs: dict[int, float] = {}
    for stage in own:
        growth = problem.kept_for_weight[stage] - problem.kept[stage]
        if stage in whole:
            needs[stage] = problem.backward_extra[stage]
        else:
            needs[stage] = max(problem.input_extra[stage], for_weight + max(growth, 0))
    return needs


def _claims(problem: Problem, own: Sequence[int], needs: dict[int, float]) -> dict[int, float]:
    """For each stage of a rank (later ones first), the memory that has to be left for its F to start.

    An F leaves memory for one F of each later stage of its rank, or microbatches on their way round would
    find none, and wait for ever for each other; and for whatever a backward pass needs.
    """
    reserve = max(needs.values(), default=0)
    claims: dict[int, float] = {}
    beyond: float = 0
    for stage in own:
        while_it_runs = max(problem.forward_extra[stage], needs[stage], beyond)
        claims[stage] = beyond = max(problem.kept[stage] + while_it_runs, reserve)
    return claims


def least_capacity(problem: Problem, whole: frozenset[int] = frozenset()) -> list[float]:
    """For each rank, the memory that one microbatch takes: with less, nothing can be scheduled.

    Args:
        problem: what has to be scheduled.
        whole: the stages that do B.
    """
    least = []
    for rank in range(problem.ranks):
        own = [stage for stage in reversed(range(problem.stages)) if problem.stage_ranks[stage] == rank]
        claims = _claims(problem, own, _needs(problem, own, whole))
        least.append(claims[own[-1]] if own else 0.0)
    return least
