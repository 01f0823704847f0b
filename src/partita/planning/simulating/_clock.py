"""Gives every action and every message of a schedule its time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.errors import PlanError, ScheduleError
from partita.planning.costs.stage_cost import StageCost
from partita.planning.hardware.cluster import Cluster
from partita.planning.schedules._program import describe_key
from partita.planning.schedules.schedule import Schedule
from partita.planning.simulating._step_program import COLLECTIVE, COMPUTE, StepProgram, step_program
from partita.planning.simulating.gradient_sums import GradientSum, gradient_sums

__all__ = ["StepTimes", "bubble_of", "step_times"]

_NEVER = -1.0
"""The time of what has not happened."""


@dataclass(frozen=True)
class StepTimes:
    """When everything in a step happens, as plain numbers.

    Attributes:
        program: what every rank does.
        starts: for each rank, the start of each of its operations, in order.
        ends: likewise their ends; a send takes no time, its message does.
        ready: for each value, when it is there; negative where it never is. Messages are values.
        sent: likewise when a message leaves; negative for what is no message.
        busy_s: for each rank, the seconds in which it computes.
        sums: what the ranks sum after the step.
    """

    program: StepProgram
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    ready: list[float]
    sent: list[float]
    busy_s: tuple[float, ...]
    sums: tuple[GradientSum, ...] = ()

    @property
    def makespan_s(self) -> float:
        """When the last operation ends."""
        ends = [*(max(ends) for ends in self.ends if ends), *(one.end_s for one in self.sums)]
        return max(ends, default=0.0)

    @property
    def rank_span_s(self) -> tuple[float, ...]:
        """For each rank, the seconds from its first pass's start to its last one's end."""
        spans = []
        for row, starts, ends in zip(self.program.rows, self.starts, self.ends, strict=True):
            passes = [at for at, (operation, _) in enumerate(row) if operation.role == COMPUTE]
            spans.append(ends[passes[-1]] - starts[passes[0]] if passes else 0.0)
        return tuple(spans)


def bubble_of(busy_s: Sequence[float], seconds: float) -> float:
    """The fraction of that time, of all ranks, in which they do not compute."""
    return 1.0 - sum(busy_s) / (len(busy_s) * seconds) if seconds else 0.0


def step_times(
    schedule: Schedule,
    costs: Sequence[StageCost],
    cluster: Cluster | None = None,
    edges: Iterable[tuple[int, int]] | None = None,
) -> StepTimes:
    """What `simulate` works out, without the objects that it returns: for those who try many schedules.

    Raises:
        PlanError: not one cost a stage, or fewer ranks in the cluster than in the schedule.
        ScheduleError: the schedule stalls (`validate` says more).
    """
    if len(costs) != schedule.stages:
        raise PlanError(f"there are {len(costs)} costs for {schedule.stages} stages: give one a stage")
    cluster = Cluster(schedule.ranks) if cluster is None else cluster
    if cluster.ranks < schedule.ranks:
        raise PlanError(
            f"the schedule has {schedule.ranks} ranks, the cluster {cluster.ranks}: give it as many"
        )
    program = step_program(schedule, costs, cluster, edges)
    clock = _Clock(program)
    if program.in_time_order:
        clock.run_in_time_order()
    else:
        clock.run()
    for rank, row in enumerate(program.rows):
        if len(clock.ends[rank]) < len(row):
            raise _stall(schedule, clock, rank)
    busy = tuple(
        sum(operation.seconds for operation, _ in row if operation.role == COMPUTE) for row in program.rows
    )
    summed = (cost.summed_gradients for cost in costs)
    sums = gradient_sums(summed, schedule.stage_ranks, cluster, clock.ends)
    return StepTimes(program, clock.starts, clock.ends, clock.ready, clock.sent, busy, sums)


class _Clock:
    def __init__(self, program: StepProgram) -> None:
        ranks = range(len(program.rows))
        self.program = program
        self.ready = [_NEVER] * program.values
        self.sent = [_NEVER] * program.values
        self.starts: tuple[list[float], ...] = tuple([] for _ in ranks)
        self.ends: tuple[list[float], ...] = tuple([] for _ in ranks)
        self._free_s = [0.0] * len(program.rows)
        self._lane_free_s = [0.0] * len(program.rows)
        self._link_free_s = [0.0] * program.links
        self._waiting: dict[int, int] = {}

    def run(self) -> None:
        """Go through the ranks one by one, each as far as what it waits for has a time.

        The order of the ranks does not matter: a rank keeps its own, and a link carries the messages of one
        rank only.
        """
        # Local names: this loop is the planner's innermost.
        ready, sent, waiting, link_free_s = self.ready, self.sent, self._waiting, self._link_free_s
        edges = [(edge.links[0] if edge.links else 0, edge.seconds) for edge in self.program.edges]
        runnable = deque(range(len(self.program.rows)))
        while runnable:
            rank = runnable.popleft()
            starts, ends = self.starts[rank], self.ends[rank]
            free_s = self._free_s[rank]
            row = self.program.rows[rank]
            for at in range(len(ends), len(row)):
                (role, seconds, needs, gives, sends), microbatch = row[at]
                # A rank is free and all that it takes is there.
                start_s = free_s
                for need in needs:
                    there_s = ready[need + microbatch]
                    if there_s < 0.0:
                        waiting[need + microbatch] = rank
                        break
                    if there_s > start_s:
                        start_s = there_s
                else:
                    if role == COLLECTIVE:
                        start_s = max(start_s, self._lane_free_s[rank])
                        end_s = self._lane_free_s[rank] = start_s + seconds
                    else:
                        end_s = free_s = start_s + seconds
                    starts.append(start_s)
                    ends.append(end_s)
                    # What it made is there, and what it sends is when the link is free and has carried it.
                    for give in gives:
                        ready[give + microbatch] = end_s
                    for first, number in sends:
                        link, carried_s = edges[number]
                        leaves_s = link_free_s[link]
                        if leaves_s < end_s:
                            leaves_s = end_s
                        message = first + microbatch
                        sent[message] = leaves_s
                        ready[message] = link_free_s[link] = leaves_s + carried_s
                        if message in waiting:
                            runnable.append(waiting.pop(message))
                    continue
                break
            self._free_s[rank] = free_s

    def run_in_time_order(self) -> None:
        """Always end the operation that ends first, so that links carry what is ready first.

        Of two ranks that are ready at the same time, the lower one goes first.
        """
        # Local names here too; a rank's next operation starts in two places, so that is a function.
        rows, starts, ends = self.program.rows, self.starts, self.ends
        ready, sent, waiting = self.ready, self.sent, self._waiting
        free_s, lane_free_s, link_free_s = self._free_s, self._lane_free_s, self._link_free_s
        edges = [(edge.links, edge.seconds) for edge in self.program.edges]
        events: list[tuple[float, int]] = []
        push, pop = heapq.heappush, heapq.heappop

        def begin(rank: int) -> None:
            """Start the next operation of a rank, if all that it takes has a time."""
            at = len(ends[rank])
            if at == len(rows[rank]):
                return
            (role, seconds, needs, _, _), microbatch = rows[rank][at]
            start_s = free_s[rank]
            for need in needs:
                there_s = ready[need + microbatch]
                if there_s < 0.0:
                    waiting[need + microbatch] = rank
                    return
                if there_s > start_s:
                    start_s = there_s
            if role == COLLECTIVE:
                push(events, (start_s, rank))
                start_s = max(start_s, lane_free_s[rank])
                end_s = lane_free_s[rank] = start_s + seconds
            else:
                end_s = free_s[rank] = start_s + seconds
                push(events, (end_s, rank))
            starts[rank].append(start_s)
            ends[rank].append(end_s)

        for rank in range(len(rows)):
            begin(rank)
        while events:
            end_s, rank = pop(events)
            (role, _, _, gives, sends), microbatch = rows[rank][len(starts[rank]) - 1]
            # What a collective gives is there later than when the rank goes on.
            there_s = ends[rank][-1] if role == COLLECTIVE else end_s
            for give in gives:
                ready[give + microbatch] = there_s
            woken: tuple[int, ...] = ()
            for first, number in sends:
                message, (links, carried_s) = first + microbatch, edges[number]
                leaves_s = end_s
                for link in links:
                    if link_free_s[link] > leaves_s:
                        leaves_s = link_free_s[link]
                sent[message] = leaves_s
                arrives_s = ready[message] = leaves_s + carried_s
                for link in links:
                    link_free_s[link] = arrives_s
                if message in waiting:
                    woken = (*woken, waiting.pop(message))
            begin(rank)
            for other in woken:
                begin(other)


def _stall(schedule: Schedule, clock: _Clock, rank: int) -> ScheduleError:
    """The error for a rank that waits for ever."""
    at = len(clock.ends[rank])
    operation, microbatch = clock.program.rows[rank][at]
    missing = next(need for need in operation.needs if clock.ready[need + microbatch] < 0.0) + microbatch
    count = schedule.stages * schedule.microbatches
    edge = next((e for e in clock.program.edges if 0 <= missing - e.first < schedule.microbatches), None)
    if edge is not None:
        key = (edge.what, edge.sender, edge.receiver, missing - edge.first)
    else:
        stage = missing % count // schedule.microbatches
        key = ("F" if missing < count else "G", stage, stage, missing % schedule.microbatches)
    action = clock.program.actions[rank][at]
    position = schedule.actions(rank).index(action)
    return ScheduleError(
        f"rank {rank} waits at action {position} ({action}) for {describe_key(key)}, for ever: validate() "
        "says who waits for whom"
    )
