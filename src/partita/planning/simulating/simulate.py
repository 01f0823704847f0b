"""Run a schedule in imagined time: how long it takes, where it idles and how much memory it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partita.errors import PlanError
from partita.garbage import no_garbage_collection
from partita.planning import _json
from partita.planning.costs.stage_cost import StageCost
from partita.planning.hardware.cluster import Cluster
from partita.planning.plan import Plan, StagePlan
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.schedule import Schedule
from partita.planning.simulating._clock import StepTimes, bubble_of, step_times
from partita.planning.simulating._step_program import COLLECTIVE, COMPUTE, TimedEdge
from partita.planning.simulating.critical_path import Causes, IdleTime
from partita.planning.simulating.memory import MemoryStep, memory_over_time, peak_bytes
from partita.planning.simulating.span import Span

__all__ = ["Simulation", "Span", "peak_bytes", "simulate", "stage_costs"]


@dataclass(frozen=True)
class Simulation:
    """What came of a simulated step.

    Attributes:
        makespan_s: seconds from the first action's start to the last one's end.
        busy_s: for each rank, the seconds in which it computes, or works for messages.
        bubble: the fraction of the ranks' time in which they don't: ``1 - sum(busy) / (ranks * makespan)``.
        peak_bytes: for each rank, the most memory that it holds at once.
        spans: the compute actions, in the order in which they start.
        transfers: the messages, as SEND_F and SEND_B actions of the sending rank, from the start of the
            transfer to its end, in the order in which they start.
        collectives: the UNSHARD and REDUCE_GRAD actions that take time, likewise; then the sums of
            `StageCost.summed_gradients`, on each rank that takes part as a REDUCE_GRAD of that stage.
        stage_ranks: the rank of each stage.
        costs: what was simulated.
        cluster: the ranks and links on which.

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
    collectives: tuple[Span, ...] = ()
    stage_ranks: tuple[int, ...] = ()
    costs: tuple[StageCost, ...] = ()
    cluster: Cluster | None = None

    @cached_property
    def memory(self) -> tuple[tuple[MemoryStep, ...], ...]:
        """For each rank, how many bytes it holds from when on; the largest is its `peak_bytes`.

        Raises:
            PlanError: the simulation was saved without its costs.
        """
        self._require_costs()
        return memory_over_time(self.spans, self.costs, self.stage_ranks, len(self.busy_s))

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The passes, messages and collectives that decide how long the step takes.

        Each begins when the one before ends, so that their `Span.seconds` add up to the makespan. To make the
        step shorter, one of them must become shorter.

        Raises:
            PlanError: the simulation was saved without its costs.
        """
        return self._causes.path()

    @cached_property
    def idle_times(self) -> tuple[IdleTime, ...]:
        """Every time in which a rank waits before one of its passes, with what it waits for.

        Raises:
            PlanError: the simulation was saved without its costs.
        """
        return self._causes.idle_times()

    @cached_property
    def _causes(self) -> Causes:
        cluster = self._require_costs()
        return Causes(self.spans, self.transfers, self.collectives, self.stage_ranks, cluster)

    def _require_costs(self) -> Cluster:
        if self.cluster is None or len(self.costs) != len(self.stage_ranks):
            raise PlanError("the simulation does not say what was simulated: simulate again")
        return self.cluster

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
        return bubble_of(self.busy_s, self.span_s)

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

    A rank does its actions in order, each as soon as what it takes is there; a pass takes its seconds divided
    by the speed of the rank. The parts of an OVERLAP_F_B take the `StageCost.overlap_s` of the stage that
    runs forward, or as long as one after the other.

    A pass takes longer by what its rank does for the messages that it takes and makes (`Cluster.handling_s`).
    A message is ready when its value is made (in a schedule with sends written out: when the rank comes to
    the send) and travels while the ranks compute. Each link carries one message at a time in each direction,
    and so does a port that ranks share: the message that is ready first goes first, and of two that are ready
    at the same time that of the lower rank. `Cluster` says who shares what.

    Gradients of tied parameters (`StageCost.tied_gradients`) are messages too, along edges of their own
    where the two stages have none: the pass that takes the sum waits for them. Of the messages of one pass
    that to the nearest stage goes first.

    UNSHARD and REDUCE_GRAD run beside the passes, one at a time on each rank, in order; a stage's first pass
    after an UNSHARD waits for it, and the step ends when the last REDUCE_GRAD has. RESHARD takes no time.
    `StageCost.summed_gradients` are summed at the end (`Cluster.all_reduce_s`), as soon as each of the ranks
    has done all else. The result depends on the arguments alone.

    Args:
        schedule: with or without sends and receives; its idle ticks are left out of account.
        costs: one a stage, or the plan that has them.
        cluster: speeds and links; the plan's own, or equal ranks with links that take no time, where it is
            not given.
        edges: pairs (producer stage, consumer stage); without them, those that the costs name
            (`StageCost.sent_values`), or else each stage feeds the next.

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
    cluster = Cluster(schedule.ranks) if cluster is None else cluster
    with no_garbage_collection():
        return _simulation(schedule, costs, cluster, step_times(schedule, costs, cluster, edges))


def _simulation(
    schedule: Schedule, costs: Sequence[StageCost], cluster: Cluster, times: StepTimes
) -> Simulation:
    return Simulation(
        makespan_s=times.makespan_s,
        busy_s=times.busy_s,
        bubble=bubble_of(times.busy_s, times.makespan_s),
        peak_bytes=peak_bytes(schedule, costs),
        spans=_in_order(_spans(times, COMPUTE)),
        transfers=_in_order(_transfers(times, schedule)),
        collectives=_in_order((*_spans(times, COLLECTIVE), *_sums(times))),
        stage_ranks=schedule.stage_ranks,
        costs=tuple(costs),
        cluster=cluster,
    )


def _in_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    """By start, then by rank; those of a rank, or on a link, stay in their order."""
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.rank, span.end_s)))


def _spans(times: StepTimes, role: int) -> Iterator[Span]:
    program = times.program
    for rank, (row, actions) in enumerate(zip(program.rows, program.actions, strict=True)):
        yield from (
            Span(rank, action, start_s, end_s)
            for (operation, _), action, start_s, end_s in zip(
                row, actions, times.starts[rank], times.ends[rank], strict=True
            )
            if operation.role == role
        )


def _transfers(times: StepTimes, schedule: Schedule) -> Iterator[Span]:
    for edge in times.program.edges:
        kind, peer, rank = _send_kind(edge), _send_peer(edge), schedule.stage_ranks[edge.sender]
        for microbatch in range(schedule.microbatches):
            leaves_s = times.sent[edge.first + microbatch]
            if leaves_s >= 0.0:
                action = Action(edge.sender, kind, microbatch, peer=peer)
                yield Span(rank, action, leaves_s, times.ready[edge.first + microbatch])


def _sums(times: StepTimes) -> Iterator[Span]:
    for stage, ranks, start_s, end_s in times.sums:
        for rank in ranks if end_s > start_s else ():
            yield Span(rank, Action(stage, ActionKind.REDUCE_GRAD), start_s, end_s)


def _send_kind(edge: TimedEdge) -> ActionKind:
    return ActionKind.SEND_F if edge.what == "F>" else ActionKind.SEND_B


def _send_peer(edge: TimedEdge) -> int | None:
    """The stage at the other end; None for the neighbour."""
    neighbour = edge.sender + 1 if edge.what == "F>" else edge.sender - 1
    return None if edge.receiver == neighbour else edge.receiver


def stage_costs(plan: Plan) -> tuple[StageCost, ...]:
    """The costs of a plan's stages, with what they recompute, as the simulator takes them.

    Raises:
        PlanError: a stage recomputes something, and the plan does not say what that costs.
    """
    return tuple(_stage_cost(plan, stage) for stage in plan.stages)


def _stage_cost(plan: Plan, stage: StagePlan) -> StageCost:
    static_bytes = round(plan.parameter_copies * stage.parameter_bytes)
    if stage.recomputed is not None:
        return replace(
            stage.recomputed,
            static_bytes=static_bytes,
            tied_gradients=stage.tied_gradients,
            summed_gradients=stage.summed_gradients,
        )
    if stage.recompute:
        raise PlanError(
            f"stage {stage.index} recomputes units, and its `recomputed` is empty: set it to what "
            "recomputed_cost() gives"
        )
    return StageCost(
        forward_s=stage.forward_s,
        backward_s=stage.backward_s,
        backward_input_s=stage.backward_input_s,
        backward_weight_s=stage.backward_weight_s,
        send_bytes=stage.send_bytes,
        send_grad_bytes=stage.send_grad_bytes,
        activation_bytes=stage.activation_bytes,
        weight_activation_bytes=stage.weight_activation_bytes,
        forward_workspace_bytes=stage.forward_workspace_bytes,
        backward_workspace_bytes=stage.backward_workspace_bytes,
        input_workspace_bytes=stage.input_workspace_bytes,
        weight_workspace_bytes=stage.weight_workspace_bytes,
        arriving_bytes=stage.arriving_bytes,
        arriving_gradient_bytes=stage.arriving_gradient_bytes,
        returned_gradient_bytes=stage.returned_gradient_bytes,
        tied_gradients=stage.tied_gradients,
        handed_gradients=stage.handed_gradients,
        summed_gradients=stage.summed_gradients,
        sent_values=stage.sent_values,
        static_bytes=static_bytes,
    )
