"""The best schedule that there is, with its proof, for small pipelines: a constraint program of a step.

Needs the extra: ``pip install 'partita[solver]'`` (OR-tools, CP-SAT).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from partita.errors import InfeasiblePlan, NotSupported, PlanError
from partita.planning._check import require_count, require_seconds
from partita.planning.costs.stage_cost import StageCost
from partita.planning.generators.making.list_scheduler import least_capacity
from partita.planning.generators.making.problem import Problem, scheduling_problem
from partita.planning.hardware.cluster import Cluster
from partita.planning.hardware.placement import check_placement
from partita.planning.schedules.schedule import Schedule
from partita.planning.searching.orders.clock import Rows, make_schedule, rows_of, run_rows
from partita.planning.simulating._clock import step_times
from partita.planning.simulating.memory import peak_bytes

__all__ = ["OptimalSchedule", "optimal_schedule"]

_UNITS = 2_000_000
"""The longest step in whole units of time: rounding then moves the bound by less than a millionth a pass."""
_F, _I, _W, _B = range(4)


@dataclass(frozen=True)
class OptimalSchedule:
    """A schedule and how far it may be from the best.

    Attributes:
        schedule: the best that was found.
        makespan_s: seconds of its simulated step.
        bound_s: no order of the passes takes less.
    """

    schedule: Schedule
    makespan_s: float
    bound_s: float

    @property
    def is_optimal(self) -> bool:
        """Whether nothing is better, up to the rounding of times (a ten-thousandth)."""
        return self.makespan_s <= self.bound_s * (1 + 1e-4)


def optimal_schedule(
    costs: Sequence[StageCost],
    microbatches: int,
    *,
    placement: Sequence[int] | None = None,
    cluster: Cluster | None = None,
    start: Schedule | None = None,
    time_limit_s: float = 60.0,
) -> OptimalSchedule:
    """The order of passes with the shortest simulated step, for stages that each feed the next.

    Every stage goes through the microbatches in order; a backward pass is B, or I and W; each link carries
    one message at a time; no rank ever holds more than its memory. Exponential: a few dozen passes take
    seconds.

    Args:
        costs: one a stage.
        microbatches: how many a step has.
        placement: the rank of each stage; one rank a stage where it is not given.
        cluster: speeds, links and memory of the ranks; links that take no time where it is not given.
        start: a schedule to begin with; none better than the best found is looked for below the bound.
        time_limit_s: when to stop; the bound then says how good the schedule is.

    Raises:
        NotSupported: OR-tools is not installed, or ranks share a link.
        InfeasiblePlan: no order fits into the memory.
        PlanError: a number out of range, fewer ranks in the cluster than in the placement, or nothing was
            found within the time limit.
    """
    # 1. Refuse what can't be.
    require_count(len(costs), "the number of costs")
    require_count(microbatches, "microbatches")
    require_seconds(time_limit_s, "time_limit_s")
    ranks = check_placement(len(costs), range(len(costs)) if placement is None else placement)
    cluster = Cluster(max(ranks) + 1) if cluster is None else cluster
    if cluster.ranks <= max(ranks):
        raise PlanError(
            f"the placement has {max(ranks) + 1} ranks, the cluster {cluster.ranks}: give it as many"
        )
    _refuse_shared_links(cluster, ranks)
    try:
        solver_api = importlib.import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        raise NotSupported("a proof of optimality needs OR-tools: pip install 'partita[solver]'") from error
    # 2. Memory: a rank that can't take one microbatch needs no search.
    problem = scheduling_problem(costs, ranks, microbatches, cluster)
    for rank, (needs, has) in enumerate(
        zip(least_capacity(problem, frozenset(range(problem.stages))), problem.capacity, strict=True)
    ):
        if needs > has:
            raise InfeasiblePlan(
                f"rank {rank} takes {needs:.0f} bytes for a microbatch and has {has:.0f}: give it "
                f"{needs - has:.0f} more"
            )
    # 3. Solve, and let the simulator say what each order takes.
    model = _Model(solver_api, problem, _longest_s(problem))
    rows, bound_s = model.solve(time_limit_s, None if start is None else rows_of(start))
    candidates = [] if start is None else [start]
    if rows is not None:
        candidates.append(make_schedule("Optimal", ranks, microbatches, rows))
    limits = [cluster.memory(rank) for rank in range(max(ranks) + 1)]
    best: tuple[float, Schedule] | None = None
    for schedule in candidates:
        peaks = peak_bytes(schedule, costs)
        if any(limit is not None and peak > limit for peak, limit in zip(peaks, limits, strict=True)):
            continue
        makespan_s = step_times(schedule, costs, cluster).makespan_s
        if best is None or makespan_s < best[0]:
            best = makespan_s, schedule
    if best is None:
        raise PlanError(f"no schedule was found in {time_limit_s} s: give more time, or a start")
    return OptimalSchedule(best[1], best[0], min(bound_s, best[0]))


def _refuse_shared_links(cluster: Cluster, ranks: Sequence[int]) -> None:
    pairs = {pair for one, other in pairwise(ranks) for pair in ((one, other), (other, one))}
    own = [link for pair in pairs if pair[0] != pair[1] for link in cluster.links(*pair)]
    if len(set(own)) < len(own):
        raise NotSupported(
            "the optimum is not known where ranks share a link: give each pair of ranks a link of its own"
        )


def _longest_s(problem: Problem) -> float:
    """One pass after the other takes so long."""
    a_microbatch = sum(problem.forward_s) + sum(problem.input_s) + sum(problem.weight_s)
    return problem.microbatches * (a_microbatch + sum(problem.down_s) + sum(problem.up_s))


class _Model:
    """The constraint program. Its times are whole numbers, rounded down, so that its bound holds."""

    def __init__(self, api: Any, problem: Problem, longest_s: float) -> None:
        self._api, self._problem = api, problem
        self._scale = _UNITS / longest_s if longest_s else 1.0
        self._model = api.CpModel()
        self._horizon = _UNITS + 1
        count = problem.stages * problem.microbatches
        self._forward = [self._time(f"F{number}") for number in range(count)]
        self._backward = [self._time(f"I{number}") for number in range(count)]
        self._weight = [self._time(f"W{number}") for number in range(count)]
        self._backward_end: dict[int, Any] = {}
        self._weight_end: dict[int, Any] = {}
        self._is_whole = [self._model.new_bool_var(f"B{number}") for number in range(count)]
        self._by_rank: list[list[Any]] = [[] for _ in problem.capacity]
        self._memory: list[list[tuple[Any, int]]] = [[] for _ in problem.capacity]
        self._links: dict[tuple[int, int], list[Any]] = {}
        self._end = self._time("end")
        for stage in range(problem.stages):
            for microbatch in range(problem.microbatches):
                self._add_passes(stage, stage * problem.microbatches + microbatch)
        for stage in range(problem.stages):
            for microbatch in range(problem.microbatches):
                self._add_messages(stage, stage * problem.microbatches + microbatch)
        self._add_limits()
        self._model.minimize(self._end)

    def _time(self, name: str) -> Any:
        return self._model.new_int_var(0, self._horizon, name)

    def _whole(self, seconds: float) -> int:
        return math.floor(seconds * self._scale)

    def _add_passes(self, stage: int, number: int) -> None:
        """F, then I or B, then W unless B was taken, with what each holds of its rank's memory."""
        problem, model = self._problem, self._model
        forward_s, input_s = self._whole(problem.forward_s[stage]), self._whole(problem.input_s[stage])
        weight_s, whole_s = self._whole(problem.weight_s[stage]), self._whole(problem.whole_s[stage])
        rank, is_whole = problem.stage_ranks[stage], self._is_whole[number]
        forward, backward, weight = self._forward[number], self._backward[number], self._weight[number]
        backward_s = input_s + (whole_s - input_s) * is_whole
        weight_left_s = weight_s - weight_s * is_whole
        backward_end, weight_end = self._time(f"end I{number}"), self._time(f"end W{number}")
        self._backward_end[number] = backward_end
        passes = (
            model.new_fixed_size_interval_var(forward, forward_s, f"F{number}"),
            model.new_interval_var(backward, backward_s, backward_end, f"I{number}"),
            model.new_interval_var(weight, weight_left_s, weight_end, f"W{number}"),
        )
        self._by_rank[rank] += passes
        model.add(weight >= backward_end)
        model.add(weight == backward_end).only_enforce_if(is_whole)
        model.add(self._end >= weight_end)
        # Microbatch by microbatch. Passes of no length still need an order, or memory could be cheated.
        if number % problem.microbatches:
            model.add(forward >= self._forward[number - 1] + forward_s)
            model.add(backward >= self._backward_end[number - 1])
            model.add(weight >= self._weight_end[number - 1])
        self._weight_end[number] = weight_end
        kept, left = int(problem.kept[stage]), int(problem.kept_for_weight[stage])
        activations = model.new_interval_var(
            forward, self._length(forward, backward_end), backward_end, f"held {number}"
        )
        left_over = model.new_interval_var(
            backward_end, self._length(backward_end, weight_end), weight_end, f"left {number}"
        )
        self._memory[rank] += [
            (activations, kept),
            (left_over, left),
            (passes[0], int(problem.forward_extra[stage])),
            (passes[1], int(problem.input_extra[stage])),
            (passes[2], int(problem.weight_extra[stage])),
        ]

    def _length(self, start: Any, end: Any) -> Any:
        length = self._model.new_int_var(0, self._horizon, "")
        self._model.add(length == end - start)
        return length

    def _add_messages(self, stage: int, number: int) -> None:
        problem, model = self._problem, self._model
        forward_s = self._whole(problem.forward_s[stage])
        last = stage == problem.stages - 1
        ends = self._backward_end
        if last:
            model.add(self._backward[number] >= self._forward[number] + forward_s)
        else:
            after = number + problem.microbatches
            there = problem.stage_ranks[stage + 1]
            self._send(
                stage, there, self._forward[number] + forward_s, problem.down_s[stage], self._forward[after]
            )
        if stage:
            before = number - problem.microbatches
            there = problem.stage_ranks[stage - 1]
            self._send(stage, there, ends[number], problem.up_s[stage], self._backward[before])

    def _send(self, stage: int, there: int, ready: Any, travel_s: float, taken: Any) -> None:
        here = self._problem.stage_ranks[stage]
        if here == there:
            self._model.add(taken >= ready)
            return
        start = self._time("")
        travel = self._whole(travel_s)
        self._model.add(start >= ready)
        self._model.add(taken >= start + travel)
        message = self._model.new_fixed_size_interval_var(start, travel, "")
        self._links.setdefault((here, there), []).append(message)

    def _add_limits(self) -> None:
        """One pass at a time on a rank, one message on a link, and no more memory than there is."""
        for rank, passes in enumerate(self._by_rank):
            self._model.add_no_overlap(passes)
            capacity = self._problem.capacity[rank]
            demands = [(interval, size) for interval, size in self._memory[rank] if size]
            if capacity < math.inf and demands:
                self._model.add_cumulative(*map(list, zip(*demands, strict=True)), int(capacity))
        for messages in self._links.values():
            self._model.add_no_overlap(messages)

    def solve(self, time_limit_s: float, start: Rows | None) -> tuple[Rows | None, float]:
        """The rows found, if any, and the bound in seconds."""
        if start is not None:
            self._hint(start)
        solver = self._api.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit_s
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        status = solver.solve(self._model)
        bound_s = solver.best_objective_bound / self._scale
        if status not in (self._api.OPTIMAL, self._api.FEASIBLE):
            return None, max(bound_s, 0.0)
        return self._order(solver), bound_s

    def _hint(self, rows: Rows) -> None:
        timing = run_rows(self._problem, rows)
        if timing is None:
            return
        variables = (self._forward, self._backward, self._weight, self._backward)
        for row, starts in zip(rows, timing.starts, strict=True):
            for (kind, _, number), start_s in zip(row, starts, strict=True):
                self._model.add_hint(variables[kind][number], self._whole(start_s))
                if kind in (_I, _B):
                    self._model.add_hint(self._is_whole[number], kind == _B)

    def _order(self, solver: Any) -> Rows:
        """The passes of each rank by their start; of those that start together, the earlier kind first."""
        problem = self._problem
        rows: list[list[tuple[int, int, int, int, int]]] = [[] for _ in problem.capacity]
        for stage, rank in enumerate(problem.stage_ranks):
            for microbatch in range(problem.microbatches):
                number = stage * problem.microbatches + microbatch
                is_whole = solver.value(self._is_whole[number])
                kinds = ((_F, self._forward), (_B if is_whole else _I, self._backward))
                for kind, variables in (*kinds, *(() if is_whole else ((_W, self._weight),))):
                    ranked = stage if kind == _F else 2 * problem.stages - stage
                    rows[rank].append((solver.value(variables[number]), ranked, kind, stage, number))
        return [[entry[2:] for entry in sorted(row)] for row in rows]
