"""What to say where nothing fits: what is short by how much, and the smallest change that would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from partita.planning.generators.registry import ScheduleKind, get_schedule, schedule_names
from partita.planning.hardware.cluster import Cluster
from partita.planning.searching.explore import explore
from partita.planning.searching.explorer import Explorer
from partita.planning.searching.trial import Case, Trial

__all__ = ["describe_shortage"]

_MOST_RANKS = 8
"""So many times the ranks are tried at most."""
_COPIES = (3.0, 2.0, 1.0)


def describe_shortage(
    case: Case, explorer: Explorer, kinds: Sequence[ScheduleKind], stages_per_rank: Sequence[int]
) -> str:
    """Return the message for costs of which no plan fits: which rank of the nearest plan is short by how many
    bytes, and the smallest change with which a plan fits, found by planning with it.
    """
    trials = explorer.ranked()
    if not trials:
        return _nothing_tried(case, explorer, stages_per_rank)
    trial = min(trials, key=lambda one: one.key)
    over = max(trial.over)
    rank = trial.over.index(over)
    stages = [stage for stage, at in enumerate(trial.layout.stage_ranks) if at == rank]
    heaviest = max(stages, key=lambda stage: _always_and_once(case, trial, stage))
    units = case.costs.units[trial.cuts[heaviest] : trial.cuts[heaviest + 1]]
    where = f"unit {units[0].name!r}" if len(units) == 1 else f"units {units[0].name!r} to {units[-1].name!r}"
    line = (
        f"nothing fits: the nearest is {trial.name}, where rank {rank} (stage {heaviest}, {where}) is short "
        f"by {over:.0f} bytes of {case.cluster.memory(rank)}"
    )
    change = next(_changes_that_fit(case, kinds, stages_per_rank), None)
    return (
        f"{line}; {change or 'no number of ranks that was tried would do: give smaller units or more memory'}"
    )


def _always_and_once(case: Case, trial: Trial, stage: int) -> int:
    cost = case.stage(
        trial.cuts[stage], trial.cuts[stage + 1], trial.regions[stage], trial.layout.same_rank[stage]
    )
    return cost.static_bytes + cost.activation_bytes


def _nothing_tried(case: Case, explorer: Explorer, stages_per_rank: Sequence[int]) -> str:
    most = len(case.costs.allowed_borders) + 1
    least = min(stages_per_rank, default=1) * case.cluster.ranks
    if least > most:
        ranks = case.cluster.ranks
        change = f"ask for {most // ranks * ranks} stages" if most >= ranks else f"take {most} ranks or fewer"
        return (
            f"{least} stages for {ranks} ranks were asked for, but this model can be cut into at most "
            f"{most}: {change}, or measure its costs by smaller units"
        )
    reasons = ". ".join(explorer.refused.values())
    return f"no schedule can serve these numbers. {reasons or 'Give at least one schedule'}"


def _changes_that_fit(
    case: Case, kinds: Sequence[ScheduleKind], stages_per_rank: Sequence[int]
) -> Iterator[str]:
    """From the smallest on."""
    every = [get_schedule(name) for name in schedule_names() if get_schedule(name).trains]
    if not case.recompute and _fits(replace_case(case, recompute=True), kinds, stages_per_rank):
        yield "with recompute=True it would fit"
    if len(kinds) < len(every) and _fits(case, every, stages_per_rank):
        yield "with other schedules (schedules=None) it would fit"
    microbatches = case.microbatches // 2
    while microbatches:
        if _fits(replace_case(case, microbatches=microbatches), kinds, stages_per_rank):
            yield f"with {microbatches} microbatches of the same size it would fit"
        microbatches //= 2
    for ranks in _more_ranks(case):
        if _fits(replace_case(case, cluster=_enlarged(case.cluster, ranks)), kinds, stages_per_rank):
            yield f"with {ranks} ranks it would fit"
            break
    for copies in _COPIES:
        smaller = replace_case(case, parameter_copies=copies)
        if copies < case.parameter_copies and _fits(smaller, kinds, stages_per_rank):
            yield f"with parameter_copies={copies:g} (a leaner optimizer) it would fit"


def _more_ranks(case: Case) -> Iterator[int]:
    """A few more first, then doubled."""
    ranks, most = case.cluster.ranks, len(case.costs.allowed_borders) + 1
    candidates = sorted(
        {ranks + 1, ranks + 2, *(ranks + ranks * part // 4 for part in range(1, 9)), 4 * ranks}
    )
    yield from (one for one in candidates if ranks < one <= min(most, _MOST_RANKS * ranks))


def _enlarged(cluster: Cluster, ranks: int) -> Cluster:
    """More ranks like those that there are, and the same links."""
    more = [rank % cluster.ranks for rank in range(ranks)]
    speeds = None if cluster.speeds is None else tuple(cluster.speed(rank) for rank in more)
    memories = None if cluster.memories is None else tuple(cluster.memory(rank) for rank in more)
    return replace(cluster, ranks=ranks, speeds=speeds, memories=memories)


def _fits(case: Case, kinds: Sequence[ScheduleKind], stages_per_rank: Sequence[int]) -> bool:
    explorer = explore(case, kinds, stages_per_rank, with_lists=True, effort=0.0)
    return any(trial.fits for trial in explorer.ranked())


def replace_case(
    case: Case,
    *,
    cluster: Cluster | None = None,
    microbatches: int | None = None,
    parameter_copies: float | None = None,
    recompute: bool | None = None,
) -> Case:
    """The same with one thing changed."""
    return Case(
        case.costs,
        case.cluster if cluster is None else cluster,
        case.microbatches if microbatches is None else microbatches,
        case.parameter_copies if parameter_copies is None else parameter_copies,
        case.recompute if recompute is None else recompute,
    )
