"""Choose the stages of a pipeline from measured costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise

from partita.errors import InfeasiblePlan, PlanError
from partita.planning._check import require_amount, require_count
from partita.planning._cuts import CutProblem, find_cuts
from partita.planning._rank_memory import find_cuts_within
from partita.planning.cluster import Cluster
from partita.planning.generators.registry import ScheduleKind, get_schedule
from partita.planning.plan import Plan, StagePlan
from partita.planning.units import CostModel

__all__ = ["plan_stages"]

_PER_SECOND = 10**15
"""Times are compared in whole femtoseconds, so that what is equal on paper is equal here."""


def plan_stages(
    costs: CostModel,
    stages: int,
    *,
    cluster: Cluster | None = None,
    schedule: str = "1F1B",
    microbatches: int = 8,
    max_memory_bytes: int | None = None,
    parameter_copies: float = 4.0,
) -> Plan:
    """Cut the units into `stages` runs of neighbours, so that the slowest stage is as fast as can be.

    What a stage adds to each microbatch of a full pipeline is its forward and its backward time, and what it
    sends:

    - GPipe, LoopedBFS and forward-only pipelines have other microbatches to work on while a message travels,
      so a stage takes the largest of its compute time and of the times of its two messages.
    - In 1F1B and its kin, a stage waits for a microbatch to go to the end and back before it starts another.
      Each message on the way counts, so a stage takes the sum.

    Among the cuts with the smallest bottleneck, those with the fewest bytes across all cuts are kept, and of
    these the most even one (least sum of squared stage times; where a large problem leaves very many such
    cuts, a near one).

    Memory: a stage holds `parameter_copies` times its parameters, and its activations for as many
    microbatches as the schedule has in flight there. The limit is for a rank: what its stages hold at the
    same time has to fit. Where the best cut does not, what is given to each stage is tried in two ways: in
    proportion to what it would hold in that cut, and evenly.

    Args:
        costs: the units in order, and what crosses each border.
        stages: how many stages are wanted.
        cluster: links, memory and the number of ranks; stages go round the ranks (or down and back up, if the
            schedule wants it). Without it, each stage has its own rank (each two, in a V), links take no time
            and memory has no limit.
        schedule: a name that `get_schedule` knows.
        microbatches: how many a step has.
        max_memory_bytes: what one rank may hold; `cluster.memory_bytes` where it is not given.
        parameter_copies: 1 for inference, 2 with gradients, 3 with momentum, 4 with Adam.

    Raises:
        InfeasiblePlan: more stages than the units can be cut into, or not enough memory.
        ScheduleError: the schedule can't serve so many stages, microbatches or ranks.
        PlanError: a number that is out of range.

    >>> from partita.planning.units import Unit
    >>> times = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 3.0}
    >>> units = tuple(Unit(name, forward_s=time, backward_s=2 * time) for name, time in times.items())
    >>> plan = plan_stages(CostModel(units, crossing_bytes=(8, 8, 8)), stages=2)
    >>> [stage.units for stage in plan.stages], plan.bottleneck_s
    ([('a', 'b', 'c'), ('d',)], 9.0)
    """
    kind = get_schedule(schedule)
    require_count(microbatches, "microbatches")
    limit = cluster.memory_bytes if max_memory_bytes is None and cluster is not None else max_memory_bytes
    if limit is not None:
        require_amount(limit, "max_memory_bytes")
    if parameter_copies < 0:
        raise PlanError(f"parameter_copies is {parameter_copies}: give 0 or more")
    _check_stages(costs, stages)
    ranks = _ranks(kind, stages, cluster)
    placement = kind.placement(stages, ranks)
    generated = kind(stages, microbatches, ranks)
    problem = _problem(costs, cluster, kind, generated.in_flight(), parameter_copies)
    cuts = find_cuts(problem) if limit is None else find_cuts_within(problem, generated, limit)
    if cuts is None and limit is not None:
        shares = replace(problem, memory=tuple(limit // placement.count(rank) for rank in placement))
        raise _too_little_memory(shares, costs, limit)
    if cuts is None:
        raise AssertionError("unreachable: without a limit every number of stages up to the most can be had")
    chosen = tuple(
        _stage(costs, problem, index, first, end - 1) for index, (first, end) in enumerate(pairwise(cuts))
    )
    return Plan(
        stages=chosen,
        placement=placement,
        schedule=kind.name,
        microbatches=microbatches,
        bottleneck_s=max(stage.time_s for stage in chosen),
        parameter_copies=float(parameter_copies),
        cluster=cluster,
    )


def _check_stages(costs: CostModel, stages: int) -> None:
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise InfeasiblePlan(f"stages is {stages!r}: give a whole number of at least 1")
    most = len(costs.allowed_borders) + 1
    if stages > most:
        why = (
            f"{len(costs.units)} units"
            if costs.borders is None
            else f"{most - 1} borders where a cut is allowed"
        )
        raise InfeasiblePlan(
            f"{stages} stages were asked for, but this model can be cut into at most {most} ({why}): "
            f"ask for {most} or fewer, or measure its costs by smaller units"
        )


def _ranks(kind: ScheduleKind, stages: int, cluster: Cluster | None) -> int:
    if kind.shape == "V":
        return max(stages // 2, 1)
    return stages if cluster is None else min(stages, cluster.ranks)


def _problem(
    costs: CostModel,
    cluster: Cluster | None,
    kind: ScheduleKind,
    in_flight: tuple[int, ...],
    parameter_copies: float,
) -> CutProblem:
    link = Cluster(1) if cluster is None else cluster
    units = costs.units
    computes = (_whole(unit.forward_s) + (_whole(unit.backward_s) if kind.trains else 0) for unit in units)
    leave = [_whole(link.transfer_s(size)) for size in costs.crossing_bytes]
    enter = [_whole(link.transfer_s(size)) if kind.trains else 0 for size in costs.gradient_bytes]
    return CutProblem(
        compute=_sums(computes),
        leave=(0, *leave, 0),
        enter=(0, *enter, 0),
        hidden=kind.hides_transfers,
        crossing=(0, *costs.crossing_bytes, 0),
        places=(0, *(border + 1 for border in costs.allowed_borders), len(units)),
        static=_sums(round(parameter_copies * unit.parameter_bytes) for unit in units),
        activations=_sums(unit.activation_bytes for unit in units),
        in_flight=in_flight,
        memory=None,
    )


def _whole(seconds: float) -> int:
    return round(seconds * _PER_SECOND)


def _sums(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))


def _stage(costs: CostModel, problem: CutProblem, index: int, first: int, last: int) -> StagePlan:
    units = costs.units[first : last + 1]
    inputs = [unit.backward_input_s for unit in units if unit.backward_input_s is not None]
    weights = [unit.backward_weight_s for unit in units if unit.backward_weight_s is not None]
    is_split = len(inputs) == len(units)
    return StagePlan(
        index=index,
        first_unit=first,
        last_unit=last,
        units=tuple(unit.name for unit in units),
        modules=tuple(module for unit in units for module in unit.modules),
        parameters=sum(unit.parameters for unit in units),
        parameter_bytes=sum(unit.parameter_bytes for unit in units),
        forward_s=sum(unit.forward_s for unit in units),
        backward_s=sum(unit.backward_s for unit in units),
        send_bytes=costs.crossing_bytes[last] if last + 1 < len(costs.units) else 0,
        send_grad_bytes=costs.gradient_bytes[first - 1] if first else 0,
        activation_bytes=sum(unit.activation_bytes for unit in units),
        backward_input_s=sum(inputs) if is_split else None,
        backward_weight_s=sum(weights) if is_split else None,
        time_s=problem.time(first, last + 1) / _PER_SECOND,
        peak_bytes=problem.bytes_held(index, first, last + 1),
    )


def _too_little_memory(problem: CutProblem, costs: CostModel, limit: int | None) -> InfeasiblePlan:
    shares = problem.memory or (0,)
    heaviest = max(
        range(len(costs.units)), key=lambda unit: problem.bytes_held(problem.stages - 1, unit, unit + 1)
    )
    needs = problem.bytes_held(problem.stages - 1, heaviest, heaviest + 1)
    return InfeasiblePlan(
        f"no cut into {problem.stages} stages fits into {limit} bytes a rank ({min(shares)} bytes a stage): "
        f"unit {costs.units[heaviest].name!r} alone takes {needs} bytes at the last stage; "
        "give more memory or stages, fewer microbatches or parameter_copies, or another schedule"
    )
