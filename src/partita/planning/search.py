"""Try schedules and numbers of stages by simulation, and rank them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.errors import InfeasiblePlan, PlanError
from partita.planning._check import require_count
from partita.planning.cluster import Cluster
from partita.planning.generators.registry import get_schedule, schedule_names
from partita.planning.plan import Plan
from partita.planning.simulate import simulate
from partita.planning.stages import plan_stages
from partita.planning.units import CostModel

__all__ = ["Candidate", "search"]


@dataclass(frozen=True)
class Candidate:
    """A plan and what its simulated step costs.

    Attributes:
        plan: the stages, their ranks and the schedule.
        makespan_s: seconds of one step.
        bubble: the fraction of the ranks' time in which they idle.
        peak_bytes: for each rank, the most memory that it holds at once.
    """

    plan: Plan
    makespan_s: float
    bubble: float
    peak_bytes: tuple[int, ...]


def search(
    costs: CostModel,
    cluster: Cluster,
    *,
    microbatches: int = 8,
    schedules: Sequence[str] | None = None,
    stages_per_rank: Sequence[int] = (1, 2),
    parameter_copies: float = 4.0,
) -> list[Candidate]:
    """The plans that use every rank of `cluster`, fastest first; of equally fast ones, least memory first.

    Args:
        costs: the units in order, for one microbatch.
        cluster: ranks, links and memory. Schedules whose stages `plan_stages` can't fit into it are left out.
        microbatches: how many a step has.
        schedules: names that `get_schedule` knows; all that train where they are not given.
        stages_per_rank: the numbers of stages on each rank to try.
        parameter_copies: as in `plan_stages`.

    Raises:
        InfeasiblePlan: nothing that was tried can be done; the message gives the reason of each.
        ScheduleError: a name that is unknown.
        PlanError: a number that is out of range.
    """
    require_count(microbatches, "microbatches")
    for count in stages_per_rank:
        require_count(count, "a number in stages_per_rank")
    kinds = [get_schedule(name) for name in schedules or schedule_names()]
    if schedules is None:
        kinds = [kind for kind in kinds if kind.trains]
    candidates: list[Candidate] = []
    refused: list[str] = []
    for kind in kinds:
        for count in stages_per_rank:
            stages = count * cluster.ranks
            try:
                plan = plan_stages(
                    costs,
                    stages,
                    cluster=cluster,
                    schedule=kind.name,
                    microbatches=microbatches,
                    parameter_copies=parameter_copies,
                )
                result = simulate(kind(stages, microbatches, plan.ranks), plan)
            except PlanError as error:
                refused.append(f"{kind.name} with {stages} stages: {error}")
                continue
            if plan.ranks == cluster.ranks:
                candidates.append(Candidate(plan, result.makespan_s, result.bubble, result.peak_bytes))
    if not candidates:
        raise InfeasiblePlan(
            "nothing that was tried can be done. " + ". ".join(refused or ["Nothing was tried"])
        )
    return sorted(candidates, key=lambda candidate: (candidate.makespan_s, max(candidate.peak_bytes)))
