"""What to say where nothing fits: what is short by how much, and the smallest changes that would do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from partita.errors import InfeasiblePlan
from partita.listing import first_few
from partita.planning.hardware._sizes import write_bytes
from partita.planning.searching.explorer import Explorer
from partita.planning.searching.remedies import SearchRequest, remedies
from partita.planning.searching.trial import Case, Trial

__all__ = ["infeasible", "nothing_fits"]


def nothing_fits(request: SearchRequest, explorer: Explorer) -> InfeasiblePlan:
    """Return the error for costs of which no plan fits: which rank of the nearest plan is short by how many
    bytes, and the smallest changes with which a plan fits, found by planning with them.
    """
    trials = explorer.ranked()
    if not trials:
        return _nothing_tried(request, explorer)
    trial = min(trials, key=lambda one: one.key)
    limits = [request.case.cluster.memory(rank) for rank in range(len(trial.over))]
    needed = [limit + over for limit, over in zip(limits, trial.over, strict=True) if limit is not None]
    return infeasible(request, _nearest(request.case, trial), int(max(needed)))


def infeasible(request: SearchRequest, reason: str, enough_memory: int | None = None) -> InfeasiblePlan:
    """The error for this reason, with the changes that do: `remedies` has the arguments."""
    changes = remedies(request, enough_memory)
    if not changes:
        least, most = _stages_asked_for(request)
        if least > most:
            few = f"take {most} ranks or fewer, with memory for the largest unit"
            return InfeasiblePlan(f"{reason}; and {_too_many_stages(request, least, most)}: {few}")
        return InfeasiblePlan(f"{reason}; no other memory or number of ranks that was tried would do")
    return InfeasiblePlan(f"{reason}; {_remedy(changes)}", reason, changes)


def _nearest(case: Case, trial: Trial) -> str:
    over = max(trial.over)
    rank = trial.over.index(over)
    stages = [stage for stage, at in enumerate(trial.layout.stage_ranks) if at == rank]
    heaviest = max(stages, key=lambda stage: _always_and_once(case, trial, stage))
    units = case.costs.units[trial.cuts[heaviest] : trial.cuts[heaviest + 1]]
    where = f"unit {units[0].name!r}" if len(units) == 1 else f"units {units[0].name!r} to {units[-1].name!r}"
    exact = "" if over < 1000 else f" ({over:.0f} bytes)"
    return (
        f"nothing fits: the nearest is {trial.name}, where rank {rank} (stage {heaviest}, {where}) is short "
        f"by {write_bytes(int(over), digits=3)}{exact} of {write_bytes(case.cluster.memory(rank) or 0)}"
    )


def _always_and_once(case: Case, trial: Trial, stage: int) -> int:
    cost = case.stages(trial.layout, trial.cuts, trial.regions)[stage]
    return cost.static_bytes + cost.activation_bytes


def _remedy(changes: Mapping[str, Any]) -> str:
    return f"{' or '.join(f'with {_in_words(*change)}' for change in changes.items())} it would fit"


def _in_words(what: str, value: Any) -> str:
    """A change of an argument of `search`, as its caller writes it."""
    if what == "memory_bytes":
        return f"memory_bytes={value} ({write_bytes(value)} a rank)"
    if what == "schedules":
        return "other schedules (schedules=None)"
    if what == "microbatches":
        return f"{value} microbatches of the same size"
    if what == "tied_gradients":
        return (
            "one sum a step of the gradients of tied weights (pipeline(tied_gradients='reduced'), or "
            "reduced_tied_gradients(costs) here)"
        )
    if what == "parameter_copies":
        return f"parameter_copies={value:g} (a leaner optimizer)"
    return f"{value} {what}" if what in ("ranks", "stages") else f"{what}={value}"


def _nothing_tried(request: SearchRequest, explorer: Explorer) -> InfeasiblePlan:
    ranks = request.case.cluster.ranks
    least, most = _stages_asked_for(request)
    if least > most:
        reason = _too_many_stages(request, least, most)
        change = f"ask for {most // ranks * ranks} stages" if most >= ranks else f"take {most} ranks or fewer"
        message = f"{reason}: {change}, or measure its costs by smaller units"
        return InfeasiblePlan(message, reason, dict(_fewer_stages(request, most)))
    if explorer.refused:
        return InfeasiblePlan(f"no schedule can serve these numbers. {'. '.join(explorer.refused.values())}")
    in_a_v = [kind.name for kind in request.kinds if kind.shape == "V"]
    if in_a_v:
        return _two_stages_a_rank(request, in_a_v, most)
    return InfeasiblePlan("no schedule can serve these numbers. Give at least one schedule")


def _stages_asked_for(request: SearchRequest) -> tuple[int, int]:
    """The least number of stages that was asked for, and the most that the model can be cut into."""
    case = request.case
    least = min(request.stages_per_rank, default=1) * case.cluster.ranks
    return least, len(case.costs.allowed_borders) + 1


def _too_many_stages(request: SearchRequest, least: int, most: int) -> str:
    ranks = request.case.cluster.ranks
    return f"{least} stages for {ranks} ranks were asked for, but this model can be cut into at most {most}"


def _two_stages_a_rank(request: SearchRequest, schedules: Sequence[str], most: int) -> InfeasiblePlan:
    """The error for schedules whose stages are placed in a V, where a rank can't have two."""
    ranks = request.case.cluster.ranks
    stages = 2 * ranks
    need = f"{first_few(schedules)} {'needs' if len(schedules) == 1 else 'need'} two stages a rank, in a V"
    if stages <= most:
        reason = f"{need}: {stages} for {ranks} ranks"
        changes = {"stages": stages} if replace(request, stages_per_rank=(2,)).fits() else {}
        return InfeasiblePlan(f"{reason}; ask for {stages} stages, or for other schedules", reason, changes)
    reason = f"{need}: {stages} for {ranks} ranks, but this model can be cut into at most {most}"
    fewer = f"take {most // 2} ranks or fewer, other schedules" if most > 1 else "take other schedules"
    return InfeasiblePlan(f"{reason}; {fewer}, or measure its costs by smaller units", reason)


def _fewer_stages(request: SearchRequest, most: int) -> Iterator[tuple[str, Any]]:
    """The change to as many stages as the model can be cut into, where there is a plan with it; to the most
    ranks that fill their machines where it can't be cut into one stage a rank.
    """
    ranks = request.case.cluster.ranks
    if most >= ranks:
        if replace(request, stages_per_rank=(most // ranks,)).fits():
            yield "stages", most // ranks * ranks
        return
    counts = range(most // min(request.stages_per_rank, default=1), 0, -1)
    clusters = ((count, request.larger(count)) for count in counts)
    count, cluster = next((pair for pair in clusters if pair[1] is not None), (0, None))
    if cluster is not None and request.fits(cluster=cluster):
        yield "ranks", count
