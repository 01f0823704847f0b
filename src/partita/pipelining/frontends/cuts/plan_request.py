"""What `pipeline` is told to plan by, and the plan that comes of it, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist

from partita.errors import ArgumentError, InfeasiblePlan, PlanError
from partita.pipelining.interface.routes import TiedGradients
from partita.planning import (
    Cluster,
    CostModel,
    Plan,
    plan_stages,
    reduced_tied_gradients,
    search,
    stage_costs,
)
from partita.planning.generators.plan_schedule import schedule_of
from partita.planning.searching.stages import check_stage_count, count_of_units, too_many_stages
from partita.planning.simulating.simulate import peak_bytes
from partita.runtime import Comm, ProcessGroupComm
from partita.runtime.publish_errors import publish_errors

__all__ = ["PlanRequest"]

_MOST_STAGES = 2
"""How many stages a rank may get from ``plan="auto"``."""
_FOR_EQUAL_STAGES = 0.02
"""So much longer, as a part of it, a step may take where fewer stages have to be compiled for that."""


@dataclass(frozen=True)
class PlanRequest:
    """Arguments of `pipeline` from which the cuts are planned.

    Attributes:
        stages: how many are wanted.
        plan: made before, or ``"auto"``.
        cluster: what is planned for.
        schedule: what is planned for; None: any (with ``stages``, 1F1B).
        microbatches: how many a step has.
        memory_limit: the bytes that a rank may hold.
        compiled: whether the stages will be compiled, equal ones once.
        tied_gradients: what the schedule will do with gradients of tied parameters.
    """

    stages: int | None
    plan: Plan | Literal["auto"] | None
    cluster: Cluster | None
    schedule: str | None
    microbatches: int
    memory_limit: int | None = None
    compiled: bool = False
    tied_gradients: TiedGradients = "exact"

    def __post_init__(self) -> None:
        if not (self.plan is None or isinstance(self.plan, Plan) or self.plan == "auto"):
            raise ArgumentError(
                f"plan is {self.plan!r:.40}: give a Plan of partita.planning (Plan.from_json reads one), or "
                "'auto'"
            )
        if self.stages is not None:
            check_stage_count(self.stages)
        if self.tied_gradients not in ("exact", "reduced"):
            raise ArgumentError(f"tied_gradients is {self.tied_gradients!r:.40}: give exact or reduced")
        self.check()  # before the model is captured

    @property
    def ready(self) -> Plan | None:
        """The plan, where there is one already."""
        return self.plan if isinstance(self.plan, Plan) else None

    def check(self) -> None:
        """Check that the ranks are there that are planned for, and have the memory.

        Raises:
            ArgumentError: ``plan="auto"`` for nobody knows how many ranks.
            PlanError: there are fewer, or they may use less memory.
        """
        if self.plan == "auto":
            self._ranks()
        if not isinstance(self.plan, Plan):
            return
        ranks = _group_size()
        if ranks is not None and self.plan.ranks > ranks:
            raise PlanError(
                f"the plan is for {self.plan.ranks} ranks and torch.distributed has {ranks}: start "
                f"{self.plan.ranks} processes, or plan for {ranks}"
            )
        if self.memory_limit is not None:
            peaks = peak_bytes(schedule_of(self.plan), stage_costs(self.plan))
            rank = max(range(len(peaks)), key=peaks.__getitem__)
            if peaks[rank] > self.memory_limit:
                raise InfeasiblePlan(
                    f"by the plan rank {rank} holds {peaks[rank]} bytes, and memory_limit is "
                    f"{self.memory_limit}: plan again with that limit (plan='auto'), or raise it"
                )

    @property
    def least_units(self) -> int | None:
        """How many units the costs must have at least."""
        return self.stages if self.plan is None else _MOST_STAGES * self._ranks()

    def check_units(self, units: int, why: Callable[[], str] = str) -> None:
        """Check the number of stages before units are measured, which takes long.

        Args:
            units: how many there are.
            why: says what keeps them from being more; empty where nothing is known to.

        Raises:
            InfeasiblePlan: there are fewer units.
        """
        if self.stages is not None and self.stages > units:
            reason = count_of_units(units, why())
            raise too_many_stages(self.stages, units, reason, "say where to cut by split_spec")

    def planned(
        self,
        measure: Callable[[], CostModel],
        measure_links: Callable[[Comm], Cluster] | None,
        *,
        whole_stages: bool = False,
    ) -> Plan:
        """Make the plan. Where ``torch.distributed`` is initialised this is collective: all ranks measure at
        the same time, so that they share the machine as in a step, and rank 0's costs and plan count.

        Args:
            measure_links: collective; asked for ``plan="auto"`` without a cluster. None: links take no time.
            whole_stages: stages can be recomputed as a whole only.

        Raises:
            InfeasiblePlan: no plan fits; on every rank.
            PlanError: numbers that can't be planned with; on every rank.
        """
        with ProcessGroupComm.from_group() if _group_size() is not None else nullcontext() as comm:
            if comm is None:
                return self._planned(measure(), self._limited(self.cluster), whole_stages=whole_stages)
            with publish_errors(comm, "measuring a model for a plan"):
                comm.barrier()
                costs = measure()
                comm.barrier()
                cluster = self.cluster
                if self.plan == "auto" and cluster is None and measure_links is not None:
                    cluster = measure_links(comm)
                answer = self._answer(comm, costs, self._limited(cluster), whole_stages=whole_stages)
        if isinstance(answer, PlanError):
            raise answer
        return Plan.from_json(answer)

    def _answer(
        self, comm: Comm, costs: CostModel, cluster: Cluster | None, *, whole_stages: bool
    ) -> str | PlanError:
        """Rank 0's plan as text, or why it has none."""
        answer: str | PlanError | None = None
        if comm.rank == 0:
            try:
                answer = self._planned(costs, cluster, whole_stages=whole_stages).to_json()
            except PlanError as error:
                answer = error.with_traceback(None)
        shared: str | PlanError = comm.all_gather_object(answer)[0]
        return shared

    def _planned(self, costs: CostModel, cluster: Cluster | None, *, whole_stages: bool) -> Plan:
        for_equal_stages = _FOR_EQUAL_STAGES if self.compiled else None
        if self.tied_gradients == "reduced":
            costs = reduced_tied_gradients(costs)
        if self.plan == "auto":
            assert cluster is not None
            candidates = search(
                costs,
                cluster,
                microbatches=self.microbatches,
                schedules=None if self.schedule is None else [self.schedule],
                for_equal_stages=for_equal_stages,
            )
            plans = [candidate.plan for candidate in candidates]
            possible = [plan for plan in plans if not whole_stages or _recomputes_whole_stages(plan)]
            if not possible:
                raise InfeasiblePlan(
                    "every plan that fits recomputes parts of stages, and these stages can be recomputed as "
                    "a whole only: raise memory_limit, or cut the model with frontend='export'"
                )
            return possible[0]
        assert self.stages is not None
        return plan_stages(
            costs,
            self.stages,
            cluster=cluster,
            schedule=self.schedule or "1F1B",
            microbatches=self.microbatches,
            max_memory_bytes=self.memory_limit,
            for_equal_stages=for_equal_stages,
        )

    def _ranks(self) -> int:
        """How many ranks ``plan="auto"`` plans for."""
        ranks = _group_size()
        if self.cluster is None and ranks is None:
            raise ArgumentError(
                "plan='auto' does not know for how many ranks: initialise torch.distributed before, or give "
                "cluster=Cluster(ranks)"
            )
        if self.cluster is not None and ranks is not None and self.cluster.ranks > ranks:
            raise PlanError(
                f"the cluster has {self.cluster.ranks} ranks and torch.distributed has {ranks}: start "
                f"{self.cluster.ranks} processes, or plan for {ranks}"
            )
        return self.cluster.ranks if self.cluster is not None else ranks or 1

    def _limited(self, cluster: Cluster | None) -> Cluster | None:
        """The cluster with the limit; where ``plan="auto"`` has none, one of links that take no time."""
        if self.plan != "auto":
            return cluster
        cluster = cluster or Cluster(self._ranks())
        if self.memory_limit is None:
            return cluster
        return replace(cluster, memory_bytes=self.memory_limit, memories=None)


def _group_size() -> int | None:
    """How many ranks ``torch.distributed`` has; None where it is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def _recomputes_whole_stages(plan: Plan) -> bool:
    return all(stage.recompute in ((), ((stage.first_unit, stage.last_unit),)) for stage in plan.stages)
