"""Run a schedule in imagined time: how long it takes, where it idles and how much memory it needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from partita.errors import PlanError, ScheduleError
from partita.planning import _json
from partita.planning._program import Key, PlannedStep, describe_key, step_compiler
from partita.planning.actions import Action, ActionKind
from partita.planning.cluster import Cluster
from partita.planning.edges import edge_table
from partita.planning.plan import Plan
from partita.planning.schedule import Schedule
from partita.planning.stage_cost import StageCost

__all__ = ["Simulation", "Span", "peak_bytes", "simulate", "stage_costs"]


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank with the seconds, from the start of the step, at which it starts and ends."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """What came of a simulated step.

    Attributes:
        makespan_s: seconds from the first action's start to the last one's end.
        busy_s: for each rank, the seconds in which it computes.
        bubble: the fraction of the ranks' time in which they don't: ``1 - sum(busy) / (ranks * makespan)``.
        peak_bytes: for each rank, the most memory that it holds at once.
        spans: the compute actions, in the order in which they start.
        transfers: the messages, as SEND_F and SEND_B actions of the sending rank, from the start of the
            transfer to its end, in the order in which they start.

    A rank's span is its own part of the step, from the start of its first action to the end of its last one.
    The zero-bubble papers measure a bubble by the longest span: what follows a step, such as the optimizer's,
    can begin on each rank when that rank is done.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    bubble: float
    peak_bytes: tuple[int, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Span, ...]

    @cached_property
    def rank_span_s(self) -> tuple[float, ...]:
        """For each rank, the seconds of its span; 0 where it computes nothing."""
        starts: dict[int, float] = {}
        ends: dict[int, float] = {}
        for span in self.spans:
            starts.setdefault(span.rank, span.start_s)
            ends[span.rank] = max(span.end_s, ends.get(span.rank, 0.0))
        return tuple(ends[rank] - starts[rank] if rank in starts else 0.0 for rank in range(len(self.busy_s)))

    @property
    def rank_bubble(self) -> tuple[float, ...]:
        """For each rank, the fraction of its span in which it does not compute."""
        return tuple(
            1.0 - busy / span if span else 0.0
            for busy, span in zip(self.busy_s, self.rank_span_s, strict=True)
        )

    @property
    def span_s(self) -> float:
        """The longest span of a rank."""
        return max(self.rank_span_s, default=0.0)

    @property
    def span_bubble(self) -> float:
        """`bubble` with the longest span in place of the makespan."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.span_s) if self.span_s else 0.0

    def to_json(self) -> str:
        """JSON text that `from_json` reads back into an equal simulation."""
        return _json.write(self, "partita.simulation")

    @classmethod
    def from_json(cls, text: str) -> Simulation:
        """Read what `to_json` wrote; PlanError says where the text is wrong."""
        return _json.read(text, cls, "partita.simulation")


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCost] | Plan,
    cluster: Cluster | None = None,
    edges: Iterable[tuple[int, int]] | None = None,
) -> Simulation:
    """How long one step takes.

    A rank does its actions in order, each as soon as what it takes is there. A message starts when its value
    is made (in a schedule with sends written out: when the rank comes to the send) and travels while the
    ranks compute; each link carries one message at a time in each direction, in the order in which they
    start. The parts of an OVERLAP_F_B take the `StageCost.overlap_s` of the stage that runs forward, or as
    long as one after the other. Actions that neither compute nor send take no time. The result depends on the
    arguments alone.

    Args:
        schedule: with or without sends and receives; its idle ticks are left out of account.
        costs: one a stage, or the plan that has them.
        cluster: the links; the plan's own, or links that take no time, where it is not given.
        edges: pairs (producer stage, consumer stage); without them, each stage feeds the next.

    Raises:
        PlanError: not one cost a stage, or fewer ranks in the cluster than in the schedule.
        ScheduleError: the schedule stalls (`validate` says more).

    >>> schedule = Schedule.from_csv("0F0,0F1,,0B0,,0B1\\n,1F0,1B0,1F1,1B1\\n")
    >>> result = simulate(schedule, [StageCost(forward_s=1.0, backward_s=2.0)] * 2)
    >>> result.makespan_s, round(result.bubble, 3)
    (9.0, 0.333)
    """
    if isinstance(costs, Plan):
        cluster = costs.cluster if cluster is None else cluster
        costs = stage_costs(costs)
    if len(costs) != schedule.stages:
        raise PlanError(f"there are {len(costs)} costs for {schedule.stages} stages: give one a stage")
    cluster = Cluster(schedule.ranks) if cluster is None else cluster
    if cluster.ranks < schedule.ranks:
        raise PlanError(
            f"the schedule has {schedule.ranks} ranks, the cluster {cluster.ranks}: give it as many"
        )
    clock = _Clock(
        schedule, costs, cluster, step_compiler(schedule, edge_table(schedule.stages, edges), blocking=False)
    )
    clock.run()
    makespan = max((span.end_s for span in clock.spans), default=0.0)
    busy = tuple(clock.busy)
    return Simulation(
        makespan_s=makespan,
        busy_s=busy,
        bubble=1.0 - sum(busy) / (schedule.ranks * makespan) if makespan else 0.0,
        peak_bytes=peak_bytes(schedule, costs),
        spans=tuple(sorted(clock.spans, key=lambda span: (span.start_s, span.rank, span.end_s))),
        transfers=tuple(sorted(clock.transfers, key=lambda span: (span.start_s, span.rank))),
    )


def stage_costs(plan: Plan) -> tuple[StageCost, ...]:
    """The costs of a plan's stages, as the simulator takes them."""
    return tuple(
        StageCost(
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            backward_input_s=stage.backward_input_s,
            backward_weight_s=stage.backward_weight_s,
            send_bytes=stage.send_bytes,
            send_grad_bytes=stage.send_grad_bytes,
            activation_bytes=stage.activation_bytes,
            static_bytes=round(plan.parameter_copies * stage.parameter_bytes),
        )
        for stage in plan.stages
    )


class _Clock:
    """Gives every action its time, in any order in which they can be run.

    That order does not matter: a rank keeps its own, and a link carries the messages of one rank only.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[StageCost],
        cluster: Cluster,
        step: Callable[[Action], PlannedStep],
    ) -> None:
        self._ranks = schedule.stage_ranks
        self._costs = costs
        self._cluster = cluster
        self._step = step
        self._rows = [schedule.actions(rank) for rank in range(schedule.ranks)]
        self._at = [0] * schedule.ranks
        self._stopped: list[PlannedStep | None] = [None] * schedule.ranks
        self._free_s = [0.0] * schedule.ranks
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._ready_s: dict[Key, float] = {}
        self._waiting: dict[Key, list[int]] = {}
        self._seconds = {
            (kind, stage): cost.seconds(kind) for stage, cost in enumerate(costs) for kind in _PASSES
        }
        self._edges: dict[tuple[str, int, int], _Edge] = {}
        self.busy = [0.0] * schedule.ranks
        self.spans: list[Span] = []
        self.transfers: list[Span] = []

    def run(self) -> None:
        runnable = deque(range(len(self._rows)))
        while runnable:
            self._advance(runnable.popleft(), runnable)
        for rank, step in enumerate(self._stopped):
            if step is not None:
                missing = next(key for key in step.needs if key not in self._ready_s)
                raise ScheduleError(
                    f"rank {rank} waits at action {self._at[rank]} ({step.action}) for "
                    f"{describe_key(missing)}, for ever: validate() says who waits for whom"
                )

    def _advance(self, rank: int, runnable: deque[int]) -> None:
        """Give times to the rank's actions up to one whose inputs have none yet."""
        row, ready_s, waiting = self._rows[rank], self._ready_s, self._waiting
        for at in range(self._at[rank], len(row)):
            step = self._stopped[rank] or self._step(row[at])
            start_s = self._free_s[rank]
            for key in step.needs:
                arrival_s = ready_s.get(key)
                if arrival_s is None:
                    self._at[rank], self._stopped[rank] = at, step
                    waiting.setdefault(key, []).append(rank)
                    return
                start_s = max(start_s, arrival_s)
            self._stopped[rank] = None
            end_s = start_s
            if step.action.is_compute:
                seconds = self._compute_s(step.action)
                end_s += seconds
                self.busy[rank] += seconds
                self.spans.append(Span(rank, step.action, start_s, end_s))
            self._free_s[rank] = end_s
            for key in step.gives:
                ready_s[key] = end_s
                runnable.extend(waiting.pop(key, ()))
            for key in step.sends:
                ready_s[key] = self._transfer(key, end_s)
                runnable.extend(waiting.pop(key, ()))
        self._at[rank] = len(row)

    def _compute_s(self, action: Action) -> float:
        if not action.parts:
            return self._seconds[action.kind, action.stage]
        forward = next((part.stage for part in action.parts if part.kind is ActionKind.F), None)
        together_s = None if forward is None else self._costs[forward].overlap_s
        if together_s is not None:
            return together_s
        return sum(self._seconds[part.kind, part.stage] for part in action.parts)

    def _transfer(self, message: Key, now_s: float) -> float:
        """Put `message` on its link, and return when it arrives."""
        what, sender, receiver, microbatch = message
        edge = self._edges.get((what, sender, receiver))
        if edge is None:
            edge = self._edges[what, sender, receiver] = self._edge(what, sender, receiver)
        start_s = max(now_s, self._link_free_s.get(edge.link, 0.0))
        end_s = start_s + edge.seconds
        self._link_free_s[edge.link] = end_s
        action = Action(sender, edge.kind, microbatch, peer=edge.peer)
        self.transfers.append(Span(edge.link[0], action, start_s, end_s))
        return end_s

    def _edge(self, what: str, sender: int, receiver: int) -> _Edge:
        forward = what == "F>"
        neighbour = sender + 1 if forward else sender - 1
        costs = self._costs
        size = costs[sender].send_bytes if forward else costs[sender].gradient_bytes(costs[receiver])
        return _Edge(
            link=(self._ranks[sender], self._ranks[receiver]),
            kind=ActionKind.SEND_F if forward else ActionKind.SEND_B,
            peer=None if receiver == neighbour else receiver,
            seconds=self._cluster.transfer_s(size),
        )


class _Edge(NamedTuple):
    """What the messages along one edge in one direction have in common."""

    link: tuple[int, int]
    kind: ActionKind
    peer: int | None
    seconds: float


_PASSES = (ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B)


def peak_bytes(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[int, ...]:
    """The most memory that each rank holds. Its actions come one by one, so time does not matter."""
    current = [0] * schedule.ranks
    for stage, rank in enumerate(schedule.stage_ranks):
        current[rank] += costs[stage].static_bytes
    most = list(current)
    trains = schedule.has_backward
    changes: dict[tuple[ActionKind, int], int] = {}
    for stage, cost in enumerate(costs):
        whole, late = cost.activation_bytes, cost.weight_bytes
        changes[ActionKind.B, stage] = -whole
        changes[ActionKind.I, stage], changes[ActionKind.W, stage] = late - whole, -late
    for rank, part in schedule.passes():
        if part.kind is not ActionKind.F:
            current[rank] += changes[part.kind, part.stage]
            continue
        size = costs[part.stage].activation_bytes
        most[rank] = max(most[rank], current[rank] + size)
        if trains:
            current[rank] += size
    return tuple(most)
