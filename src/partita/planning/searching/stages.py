"""Choose the stages of a pipeline from measured costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from partita.errors import InfeasiblePlan
from partita.planning._check import require_amount, require_copies, require_count, require_part
from partita.planning.costs.cost_model import CostModel
from partita.planning.costs.shared_on_rank import shared_on_rank
from partita.planning.costs.tied_gradients import summed_gradients, tied_gradients_of, tied_messages
from partita.planning.cutting._cuts import CutProblem, Cuts, find_cuts
from partita.planning.cutting._rank_memory import find_cuts_within
from partita.planning.cutting.cut_problem import PER_SECOND, make_cut_problem
from partita.planning.cutting.equal_stages import cuts_with_equal_stages, unit_kinds
from partita.planning.cutting.make_stage import make_stage
from partita.planning.generators.registry import ScheduleKind, get_schedule
from partita.planning.hardware.cluster import Cluster
from partita.planning.plan import Plan
from partita.planning.searching.explorer import Explorer, moving_budget
from partita.planning.searching.layouts import Layout
from partita.planning.searching.trial import Case

__all__ = ["check_stage_count", "count_of_units", "plan_stages", "too_many_stages"]


def plan_stages(
    costs: CostModel,
    stages: int,
    *,
    cluster: Cluster | None = None,
    schedule: str = "1F1B",
    microbatches: int = 8,
    max_memory_bytes: int | None = None,
    parameter_copies: float = 4.0,
    for_equal_stages: float | None = None,
) -> Plan:
    """Cut the units into `stages` runs of neighbours, for a schedule that has a name.

    Where each rank has one stage and all ranks are equal, the slowest stage is as fast as can be. What a
    stage adds to each microbatch of a full pipeline is its forward and its backward time, and what it sends:

    - GPipe, LoopedBFS and forward-only pipelines have other microbatches to work on while a message travels,
      so a stage takes the largest of its compute time and of the times of its two messages.
    - In 1F1B and its kin, a stage waits for a microbatch to go to the end and back before it starts another.
      Each message on the way counts, so a stage takes the sum.

    Among the cuts with the smallest bottleneck, those with the fewest bytes across all cuts are kept, and of
    these the most even one (least sum of squared stage times; where a large problem leaves very many such
    cuts, a near one).

    Where ranks have several stages, speeds or memories of their own, or work for messages, the step of the
    schedule is simulated for cuts with the fastest slowest stage and for cuts that give each rank its share
    of the work; then borders move for as long as that shortens the step. Those cuts are good, not proven to
    be the best. `search` tries more: other schedules, orders and placements, and recomputation.

    Memory: a stage holds `parameter_copies` times its parameters, and its activations for as many
    microbatches as the schedule has in flight there. The limit is for a rank: what its stages hold at the
    same time has to fit. Where several stages share it and the best cut does not fit, what is given to each
    stage is tried in two ways: in proportion to what it would hold in that cut, and evenly.

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
        for_equal_stages: for stages that will be compiled, equal ones once: how much longer the slowest stage
            may take where that makes more stages equal (of units of the same `Unit.kind`), as a part of it:
            0.02 for 2 %. Where the step is simulated, how much longer that may take. None: it does not
            matter.

    Raises:
        InfeasiblePlan: more stages than the units can be cut into, or not enough memory.
        ScheduleError: the schedule can't serve so many stages, microbatches or ranks.
        PlanError: a number that is out of range.

    >>> from partita.planning.costs.units import Unit
    >>> times = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 3.0}
    >>> units = tuple(Unit(name, forward_s=time, backward_s=2 * time) for name, time in times.items())
    >>> plan = plan_stages(CostModel(units, crossing_bytes=(8, 8, 8)), stages=2)
    >>> [stage.units for stage in plan.stages], plan.bottleneck_s
    ([('a', 'b', 'c'), ('d',)], 9.0)
    """
    # 1. Refuse what can't be.
    kind = get_schedule(schedule)
    require_count(microbatches, "microbatches")
    limit = cluster.memory_bytes if max_memory_bytes is None and cluster is not None else max_memory_bytes
    if limit is not None:
        require_amount(limit, "max_memory_bytes")
    require_copies(parameter_copies, "parameter_copies")
    _check_stages(costs, stages)
    if for_equal_stages is not None:
        require_part(for_equal_stages, "for_equal_stages")
    # 2. Who runs which stage, and how many microbatches each keeps: the schedule says so, whatever the cuts.
    ranks = _ranks(kind, stages, cluster)
    placement = kind.placement(stages, ranks)
    generated = kind(stages, microbatches, ranks)
    problem = make_cut_problem(
        costs,
        cluster,
        generated.in_flight(),
        parameter_copies,
        hides_transfers=kind.hides_transfers,
        trains=kind.trains,
    )
    # 3. Find the cuts: exactly where formulas say what a stage takes, else by simulating.
    if ranks < stages or (cluster is not None and (cluster.has_handling or not _has_equal_ranks(cluster))):
        case = Case(costs, _limited(cluster, ranks, limit), microbatches, parameter_copies, recompute=False)
        cuts = _cuts_by_simulation(case, kind, placement, for_equal_stages)
    else:
        cuts = find_cuts(problem) if limit is None else find_cuts_within(problem, generated, limit)
        if cuts is not None and for_equal_stages is not None:
            within = replace(problem, memory=None if limit is None else (limit,) * stages)
            cuts = cuts_with_equal_stages(within, unit_kinds(costs), cuts, for_equal_stages)
    if cuts is None and limit is not None:
        shares = replace(problem, memory=tuple(limit // placement.count(rank) for rank in placement))
        raise _too_little_memory(shares, costs, limit)
    if cuts is None:
        raise AssertionError("unreachable: without a limit every number of stages up to the most can be had")
    # 4. Say what each stage takes.
    shared, tied = shared_on_rank(costs, cuts, placement), tied_messages(costs, cuts)
    summed = summed_gradients(costs, cuts)
    chosen = tuple(
        make_stage(
            costs,
            index,
            start,
            end - 1,
            time_s=problem.time(start, end) / PER_SECOND / (1.0 if cluster is None else cluster.speed(rank)),
            peak_bytes=problem.bytes_held(index, start, end),
            shared=shared[index],
            tied=tied[index],
            summed=summed[index],
        )
        for index, ((start, end), rank) in enumerate(zip(pairwise(cuts), placement, strict=True))
    )
    return Plan(
        stages=chosen,
        placement=placement,
        schedule=kind.name,
        microbatches=microbatches,
        bottleneck_s=max(stage.time_s for stage in chosen),
        parameter_copies=float(parameter_copies),
        cluster=cluster,
        tied_gradients=tied_gradients_of(costs),
    )


def _check_stages(costs: CostModel, stages: int) -> None:
    check_stage_count(stages)
    most = len(costs.allowed_borders) + 1
    if stages > most:
        why = (
            count_of_units(len(costs.units))
            if costs.borders is None
            else f"{most - 1} borders where a cut is allowed"
        )
        raise too_many_stages(stages, most, why)


def check_stage_count(stages: object) -> None:
    """Check that it is a number of stages.

    Raises:
        InfeasiblePlan: it is not.
    """
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise InfeasiblePlan(f"stages is {stages!r:.40}: give a whole number of at least 1")


def count_of_units(units: int, why: str = "") -> str:
    """So many units, in words, and why they are no more, where that is known."""
    count = "1 unit" if units == 1 else f"{units} units"
    return f"{count}; {why}" if why else count


def too_many_stages(
    stages: int, most: int, why: str, otherwise: str = "measure its costs by smaller units"
) -> InfeasiblePlan:
    """The error for more stages than a model can be cut into, and what else to do."""
    fewer = f"ask for {most} or fewer" if most > 1 else "leave it whole"
    reason = f"this model can be cut into at most {most} ({why})"
    return InfeasiblePlan(
        f"{stages} stages were asked for, but {reason}: {fewer}, or {otherwise}",
        reason,
    )


def _ranks(kind: ScheduleKind, stages: int, cluster: Cluster | None) -> int:
    if kind.shape == "V":
        return max(stages // 2, 1)
    return stages if cluster is None else min(stages, cluster.ranks)


def _has_equal_ranks(cluster: Cluster) -> bool:
    kinds = {(cluster.speed(rank), cluster.memory(rank)) for rank in range(cluster.ranks)}
    return len(kinds) == 1


def _limited(cluster: Cluster | None, ranks: int, limit: int | None) -> Cluster:
    """The cluster with the limit that holds, of at least so many ranks."""
    cluster = Cluster(ranks) if cluster is None else cluster
    return cluster if cluster.memories is not None else replace(cluster, memory_bytes=limit)


def _cuts_by_simulation(
    case: Case, kind: ScheduleKind, placement: tuple[int, ...], for_equal_stages: float | None
) -> Cuts | None:
    """The cuts with the shortest simulated step, borders moved; None where none was found that fits."""
    budget = moving_budget(len(placement), case.microbatches)
    # Plans by name have no order of their own, so the one that costs make no difference to counts.
    by_name = replace(kind, for_costs=None)
    explorer = Explorer(case, budget, trains=kind.trains)
    explorer.try_named(by_name, Layout(kind.shape, placement, tuple(range(max(placement) + 1))))
    explorer.move_named_cuts()
    best = explorer.ranked()[0]
    if for_equal_stages is not None and best.fits:
        (best,) = explorer.with_equal_stages([best], best.end_s * (1 + for_equal_stages))
    return best.cuts if best.fits else None


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
