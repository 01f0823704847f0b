"""Choose stages, placement, schedule and recomputation together, by the simulated step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from partita.errors import ScheduleError
from partita.garbage import no_garbage_collection
from partita.listing import listed
from partita.planning._check import require_copies, require_count, require_part
from partita.planning.costs.cost_model import CostModel
from partita.planning.cutting.equal_stages import distinct_stages, unit_kinds
from partita.planning.generators.making.arguments import check_step_size
from partita.planning.generators.registry import ScheduleKind, get_schedule, schedule_names
from partita.planning.hardware.cluster import Cluster
from partita.planning.plan import Plan
from partita.planning.searching.bounds import too_little_memory
from partita.planning.searching.cuts.cut_reasons import explain_cuts
from partita.planning.searching.explore import explore
from partita.planning.searching.explorer import LIST
from partita.planning.searching.remedies import SearchRequest, larger_cluster
from partita.planning.searching.result import Candidate, candidate_of
from partita.planning.searching.shortage import infeasible, nothing_fits
from partita.planning.searching.trial import Case

__all__ = ["Candidate", "search"]


def search(
    costs: CostModel,
    cluster: Cluster,
    *,
    microbatches: int = 8,
    schedules: Sequence[str] | None = None,
    stages_per_rank: Sequence[int] = (1, 2),
    parameter_copies: float = 4.0,
    recompute: bool = True,
    for_equal_stages: float | None = None,
    progress: Callable[[str, float], None] | None = None,
    larger: Callable[[int], Cluster | None] | None = None,
) -> list[Candidate]:
    """The plans that use every rank of `cluster`, fastest first; of equally fast ones, least memory first.

    Tried are, by simulated makespan and within the memory of each rank: the named schedules and orders made
    for the very costs (list scheduling with memory, improved along the critical path); stages round the ranks
    and in a V, with unequal ranks in several orders; cuts with the fastest slowest stage, cuts that give each
    rank its share of the work, and cuts that fit the memory, all with borders moved for as long as that
    helps; and recomputing as little of a stage as will do. How much is tried depends on the numbers of
    stages and microbatches alone, so equal arguments give equal results.

    Args:
        costs: the units in order, for one microbatch.
        cluster: ranks, links and memory.
        microbatches: how many a step has.
        schedules: names that `get_schedule` knows, and "ListSchedule" for orders that are made here; all of
            them that train where they are not given. "ForwardOnly", for evaluation, stands alone.
        stages_per_rank: the numbers of stages on each rank to try.
        parameter_copies: as in `plan_stages`.
        recompute: whether units may be computed again in the backward pass to save memory.
        for_equal_stages: as in `plan_stages`, of the fastest step. Of the candidates within that, the one
            with the fewest stages that differ comes first.
        progress: called with what is done now and the part of all that is behind it, 0.0 to 1.0.
        larger: which cluster there is with so many ranks, or None, to say how many would do where nothing
            fits; whole nodes with ranks and links like those of `cluster` where it is not given.

    Returns:
        One candidate for each schedule, shape of placement and number of stages that can be had. The plan of
        the first says why each of its cuts is where it is (`Plan.cuts`).

    Raises:
        InfeasiblePlan: nothing fits; the message says what is short by how much, and what changes would
            do; it carries these as data too.
        ScheduleError: a name that is unknown, one without backward passes beside others that train, or a
            step of more than 4096 stages or a million forward passes.
        PlanError: a number that is out of range.

    >>> from partita.planning import Unit
    >>> units = tuple(Unit(f"u{index}", 1.0, 2.0, parameter_bytes=8) for index in range(6))
    >>> best = search(CostModel(units, (4,) * 5), Cluster(2), microbatches=4)[0]
    >>> best.makespan_s  # 4 microbatches take each rank 36 s, and the last one gets its first input after 3
    37.0
    """
    # Numbers and names that can't be.
    require_count(microbatches, "microbatches")
    require_copies(parameter_copies, "parameter_copies")
    if for_equal_stages is not None:
        require_part(for_equal_stages, "for_equal_stages")
    for count in stages_per_rank:
        require_count(count, "a number in stages_per_rank")
    stages = min(max(stages_per_rank, default=1) * cluster.ranks, len(costs.allowed_borders) + 1)
    check_step_size("a step", stages, microbatches)
    names = [*schedule_names(), LIST] if schedules is None else _names(schedules)
    kinds = [get_schedule(name) for name in names if name != LIST]
    if schedules is None:
        kinds = [kind for kind in kinds if kind.trains]
    elif len(kinds) < len(names) or any(kind.trains for kind in kinds):
        _check_all_train(kinds, names)
    # What cannot fit, whatever the schedule, needs no search.
    case = Case(costs, cluster, microbatches, parameter_copies, recompute)
    with_lists = schedules is None or len(kinds) < len(names)
    request = SearchRequest(
        case, kinds, stages_per_rank, with_lists, larger or (lambda ranks: larger_cluster(cluster, ranks))
    )
    shortage = too_little_memory(case, trains=request.trains)
    if shortage is not None:
        raise infeasible(request, shortage)
    # The fastest of each kind; then, where asked for, the same with more stages that are equal.
    with no_garbage_collection():
        explorer = explore(case, kinds, stages_per_rank, with_lists=with_lists, progress=progress)
        fitting = [trial for trial in explorer.ranked() if trial.fits]
        if not fitting:
            raise nothing_fits(request, explorer)
        candidates = [candidate_of(case, trial) for trial in fitting]
        most_s = min(one.makespan_s for one in candidates) * (1 + (for_equal_stages or 0.0))
        if for_equal_stages is not None:
            changed = (candidate_of(case, trial) for trial in explorer.with_equal_stages(fitting, most_s))
            pairs = zip(changed, candidates, strict=True)
            candidates = [one if one.makespan_s <= most_s else before for one, before in pairs]

        def rank(one: Candidate) -> tuple[float, ...]:
            distinct = 0.0
            if for_equal_stages is not None:
                distinct = _count_distinct(costs, one.plan) if one.makespan_s <= most_s else inf
            return distinct, one.makespan_s, max(one.peak_bytes)

        candidates.sort(key=rank)
        best = candidates[0]
        reasons = explain_cuts(costs, best.plan)
    return [replace(best, plan=replace(best.plan, cuts=reasons)), *candidates[1:]]


def _count_distinct(costs: CostModel, plan: Plan) -> int:
    """How many stages of a plan differ from each other."""
    cuts = [*(stage.first_unit for stage in plan.stages), len(costs.units)]
    return distinct_stages(unit_kinds(costs), cuts, [stage.recompute for stage in plan.stages])


def _names(schedules: Sequence[str]) -> list[str]:
    """A list of the names; a text alone is one."""
    listed_names = [schedules] if isinstance(schedules, str) else list(schedules)
    return [LIST if str(name).lower() == LIST.lower() else name for name in listed_names]


def _check_all_train(kinds: Sequence[ScheduleKind], names: Sequence[str]) -> None:
    forward = next((kind.name for kind in kinds if not kind.trains), None)
    if forward is not None:
        others = [name for name in names if name.lower() != forward.lower()]
        raise ScheduleError(
            f"schedules has {forward!r}, which has no backward passes, beside {listed(others)}: it would be "
            f"the fastest of any list, and train nothing. Search for training without it, and with "
            f"schedules=[{forward!r}] for evaluation"
        )
