"""Run a schedule in imagined time: how long it takes, where it idles and how much memory it needs."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.errors import PlanError, ScheduleError
from partita.planning import _json
from partita.planning._check import require_amount, require_seconds
from partita.planning._program import Key, PlannedStep, compile_steps, describe_key
from partita.planning.actions import Action, ActionKind
from partita.planning.cluster import Cluster
from partita.planning.edges import edge_table
from partita.planning.plan import Plan
from partita.planning.schedule import Schedule

__all__ = ["Simulation", "Span", "StageCost", "simulate", "stage_costs"]


@dataclass(frozen=True)
class StageCost:
    """What one stage costs for one microbatch.

    Attributes:
        forward_s: seconds of the forward pass.
        backward_s: seconds of the whole backward pass.
        backward_input_s: seconds of I; half of `backward_s` where it is not given.
        backward_weight_s: seconds of W; half of `backward_s` where it is not given. Both or none.
        send_bytes: what the forward pass sends along each edge that leaves the stage.
        send_grad_bytes: what the backward pass sends back along each edge that enters the stage; where it is
            not given, as much as came along the edge.
        activation_bytes: kept from the start of the forward pass to the end of the backward pass (of W, where
            it is split).
        static_bytes: there all the time: parameters, gradients, optimizer state.

    Raises:
        PlanError: a value that is negative or no number, or one half of the backward pass without the other.
    """

    forward_s: float
    backward_s: float
    backward_input_s: float | None = None
    backward_weight_s: float | None = None
    send_bytes: int = 0
    send_grad_bytes: int | None = None
    activation_bytes: int = 0
    static_bytes: int = 0

    def __post_init__(self) -> None:
        require_seconds(self.forward_s, "forward_s")
        require_seconds(self.backward_s, "backward_s")
        if (self.backward_input_s is None) != (self.backward_weight_s is None):
            raise PlanError("one of backward_input_s and backward_weight_s is given: give both or none")
        for what in ("backward_input_s", "backward_weight_s"):
            if getattr(self, what) is not None:
                require_seconds(getattr(self, what), what)
        for what in ("send_bytes", "activation_bytes", "static_bytes"):
            require_amount(getattr(self, what), what)
        if self.send_grad_bytes is not None:
            require_amount(self.send_grad_bytes, "send_grad_bytes")

    def seconds(self, kind: ActionKind) -> float:
        """How long an F, I, W or B of the stage takes."""
        if kind is ActionKind.F:
            return self.forward_s
        if kind is ActionKind.B:
            return self.backward_s
        split = self.backward_input_s if kind is ActionKind.I else self.backward_weight_s
        return self.backward_s / 2 if split is None else split


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
            transfer to its end.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    bubble: float
    peak_bytes: tuple[int, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Span, ...]

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
    start. The parts of an OVERLAP_F_B take as long as one after the other. Actions that neither compute nor
    send take no time. The result depends on the arguments alone.

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
    programs = compile_steps(schedule, edge_table(schedule.stages, edges), blocking=False)
    clock = _Clock(schedule, costs, cluster, programs)
    clock.run()
    makespan = max((span.end_s for span in clock.spans), default=0.0)
    busy = tuple(clock.busy)
    return Simulation(
        makespan_s=makespan,
        busy_s=busy,
        bubble=1.0 - sum(busy) / (schedule.ranks * makespan) if makespan else 0.0,
        peak_bytes=_peaks(schedule, costs),
        spans=tuple(sorted(clock.spans, key=lambda span: (span.start_s, span.rank, span.end_s))),
        transfers=tuple(clock.transfers),
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
    """The event loop. Events are ends of actions, taken in order of time and then of rank."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[StageCost],
        cluster: Cluster,
        programs: list[list[PlannedStep]],
    ) -> None:
        self._ranks = schedule.stage_ranks
        self._costs = costs
        self._cluster = cluster
        self._programs = programs
        self._at = [0] * len(programs)
        self._free_s = [0.0] * len(programs)
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._ready_s: dict[Key, float] = {}
        self._waiting: dict[Key, list[int]] = {}
        self._events: list[tuple[float, int]] = []
        self._seconds = {
            (kind, stage): cost.seconds(kind) for stage, cost in enumerate(costs) for kind in _PASSES
        }
        self.busy = [0.0] * len(programs)
        self.spans: list[Span] = []
        self.transfers: list[Span] = []

    def run(self) -> None:
        for rank in range(len(self._programs)):
            self._start_next(rank)
        while self._events:
            now_s, rank = heapq.heappop(self._events)
            step = self._programs[rank][self._at[rank]]
            self._at[rank] += 1
            awake = [rank]
            for key in step.gives:
                self._ready_s[key] = now_s
                awake += self._waiting.pop(key, ())
            for key in step.sends:
                self._ready_s[key] = self._transfer(key, now_s)
                awake += self._waiting.pop(key, ())
            for woken in awake:
                self._start_next(woken)
        for rank, program in enumerate(self._programs):
            if self._at[rank] < len(program):
                step = program[self._at[rank]]
                missing = next(key for key in step.needs if key not in self._ready_s)
                raise ScheduleError(
                    f"rank {rank} waits at action {self._at[rank]} ({step.action}) for "
                    f"{describe_key(missing)}, for ever: validate() says who waits for whom"
                )

    def _start_next(self, rank: int) -> None:
        """Start the rank's next action, or note what it waits for."""
        program, at = self._programs[rank], self._at[rank]
        if at == len(program):
            return
        step = program[at]
        start_s = self._free_s[rank]
        for key in step.needs:
            ready_s = self._ready_s.get(key)
            if ready_s is None:
                self._waiting.setdefault(key, []).append(rank)
                return
            start_s = max(start_s, ready_s)
        end_s = start_s
        passes = step.action.passes
        if passes:
            seconds = sum(self._seconds[part.kind, part.stage] for part in passes)
            end_s += seconds
            self.busy[rank] += seconds
            self.spans.append(Span(rank, step.action, start_s, end_s))
        self._free_s[rank] = end_s
        heapq.heappush(self._events, (end_s, rank))

    def _transfer(self, message: Key, now_s: float) -> float:
        """Put `message` on its link, and return when it arrives."""
        what, sender, receiver, microbatch = message
        link = (self._ranks[sender], self._ranks[receiver])
        start_s = max(now_s, self._link_free_s.get(link, 0.0))
        end_s = start_s + self._cluster.transfer_s(self._message_bytes(what, sender, receiver))
        self._link_free_s[link] = end_s
        kind = ActionKind.SEND_F if what == "F>" else ActionKind.SEND_B
        neighbour = sender + 1 if kind is ActionKind.SEND_F else sender - 1
        action = Action(sender, kind, microbatch, peer=None if receiver == neighbour else receiver)
        self.transfers.append(Span(link[0], action, start_s, end_s))
        return end_s

    def _message_bytes(self, what: str, sender: int, receiver: int) -> int:
        if what == "F>":
            return self._costs[sender].send_bytes
        given = self._costs[sender].send_grad_bytes
        return self._costs[receiver].send_bytes if given is None else given


_PASSES = (ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B)


def _peaks(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[int, ...]:
    """The most memory that each rank holds. Its actions come one by one, so time does not matter."""
    held = [0] * schedule.ranks
    for stage, rank in enumerate(schedule.stage_ranks):
        held[rank] += costs[stage].static_bytes
    most = list(held)
    trains = schedule.has_backward
    for rank, part in schedule.passes():
        size = costs[part.stage].activation_bytes
        if part.kind is ActionKind.F:
            held[rank] += size
            most[rank] = max(most[rank], held[rank])
        if part.kind in (ActionKind.W, ActionKind.B) or not trains:
            held[rank] -= size
    return tuple(most)
