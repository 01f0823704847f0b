"""What ``partita plan`` is asked for: checked before a model is made, then carried out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from partita.cli.options.machines import Machines
from partita.cli.options.plan_remedies import in_options
from partita.cli.options.schedule_cases import schedule_kinds
from partita.errors import InfeasiblePlan, UsageError
from partita.planning import Candidate, Cluster, CostModel, devices, search

__all__ = [
    "PlanOptions",
    "device_names",
    "plan_schedules",
]

Progress = Callable[[float], None]

LIST_SCHEDULE = "ListSchedule"
"""What `search` calls the orders that it makes for the very costs."""


@dataclass(frozen=True)
class PlanOptions:
    """What is to be chosen, and within what.

    Attributes:
        cluster: ranks, links and memory.
        microbatches: how many a step has.
        stages: how many, a multiple of the ranks; None for one or two a rank, whichever is faster.
        schedules: names; None for all that train.
        parameter_copies: what a byte of parameters costs, gradients and optimizer included.
        recompute: whether units may be computed again in the backward pass.
        machines: the options that `cluster` was made from, to say what to type where nothing fits.

    Raises:
        UsageError: a number that is out of range.
        ScheduleError: a schedule that is unknown.
    """

    cluster: Cluster
    microbatches: int
    stages: int | None = None
    schedules: tuple[str, ...] | None = None
    parameter_copies: float = 4.0
    recompute: bool = True
    machines: Machines | None = None

    def __post_init__(self) -> None:
        ranks = self.cluster.ranks
        if self.microbatches < 1:
            raise UsageError(f"--microbatches is {self.microbatches}: give 1 or more")
        if not 0 <= self.parameter_copies < 1000:
            raise UsageError(
                f"--parameter-copies is {self.parameter_copies}: give 1 for inference, 4 for Adam"
            )
        if self.stages is not None and (self.stages < 1 or self.stages % ranks):
            near = max(1, self.stages // ranks) * ranks
            raise UsageError(
                f"--stages is {self.stages} for {ranks} ranks: give auto or a multiple of the ranks, such as "
                f"{near} or {near + ranks}"
            )

    @classmethod
    def from_options(
        cls,
        cluster: Cluster,
        microbatches: int,
        stages: str,
        schedule: str,
        parameter_copies: float,
        recompute: bool,
        machines: Machines | None = None,
    ) -> PlanOptions:
        """Read ``--stages`` and ``--schedule``, of which each may be ``auto``."""
        if stages != "auto" and not stages.isdecimal():
            raise UsageError(f"--stages is {stages!r:.40}: give auto or a number")
        names = None
        if schedule.lower() not in ("auto", "all"):
            names = plan_schedules(schedule)
        count = None if stages == "auto" else int(stages)
        return cls(cluster, microbatches, count, names, parameter_copies, recompute, machines)

    def in_dtype(self, dtype: str) -> PlanOptions:
        """The same for a model whose parameters are of that dtype: devices that differ, differ otherwise."""
        if self.machines is None:
            return self
        machines = replace(self.machines, dtype=dtype)
        return replace(self, machines=machines, cluster=machines.cluster()[0])

    def candidates(self, costs: CostModel, progress: Progress | None = None) -> list[Candidate]:
        """Search, the best first; `progress` gets the share that is done.

        Raises:
            InfeasiblePlan: nothing fits; the message says what is short, and which options would do.
            UsageError: ``--memory`` has no unit, and as bytes it is less than a single unit takes.
        """
        self._refuse_forgotten_unit(costs)
        stages_per_rank = None if self.stages is None else self.stages // self.cluster.ranks
        try:
            return search(
                costs,
                self.cluster,
                microbatches=self.microbatches,
                schedules=self.schedules,
                stages_per_rank=(1, 2) if stages_per_rank is None else (stages_per_rank,),
                parameter_copies=self.parameter_copies,
                recompute=self.recompute,
                progress=None if progress is None else lambda _, share: progress(share),
                larger=None if self.machines is None else self.machines.larger,
            )
        except InfeasiblePlan as error:
            raise in_options(error, self.machines, stages_per_rank) from error

    def _refuse_forgotten_unit(self, costs: CostModel) -> None:
        if self.machines is not None:
            heaviest = max(costs.units, key=lambda unit: unit.parameter_bytes)
            self.machines.refuse_forgotten_unit(
                f"unit {heaviest.name!r}", heaviest.parameter_bytes, self.parameter_copies
            )

    def with_one_more_rank(self) -> PlanOptions:
        """The same for a cluster with one more rank like the last; as many stages a rank."""
        cluster = self.cluster
        more = replace(
            cluster,
            ranks=cluster.ranks + 1,
            speeds=cluster.speeds and (*cluster.speeds, cluster.speeds[-1]),
            memories=cluster.memories and (*cluster.memories, cluster.memories[-1]),
        )
        stages = None if self.stages is None else self.stages // cluster.ranks * more.ranks
        return replace(self, cluster=more, stages=stages, machines=None)


def plan_schedules(names: str) -> tuple[str, ...]:
    """The names in ``--schedule``: those of `schedule_kinds`, and the one for orders made for the costs.

    >>> plan_schedules("1f1b,listschedule")
    ('1F1B', 'ListSchedule')
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if {"all", "auto"}.intersection(map(str.lower, wanted)):
        wanted = ["all" if name.lower() == "auto" else name for name in (*wanted, LIST_SCHEDULE)]
    named = [name for name in wanted if name.lower() != LIST_SCHEDULE.lower()]
    kinds = schedule_kinds(",".join(named)) if named or not wanted else ()
    return (*(kind.name for kind in kinds), *((LIST_SCHEDULE,) if len(named) < len(wanted) else ()))


def device_names(file: Path | None = None) -> list[str]:
    """The names that ``--devices`` knows."""
    return sorted(devices(file))
