"""Which schedules a simulation compares, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from partita.errors import PlanError, ScheduleError, UsageError
from partita.planning import (
    Cluster,
    Plan,
    Schedule,
    Simulation,
    StageCost,
    get_schedule,
    schedule_names,
    schedule_of,
    simulate,
    stage_costs,
)
from partita.planning.generators.registry import ScheduleKind

__all__ = [
    "MICROBATCH_BYTES",
    "ScheduleCase",
    "SimulatedSchedule",
    "StageTimes",
    "cases_from_plan",
    "cases_from_times",
    "schedule_kinds",
    "simulate_cases",
    "stages_a_rank",
]

MICROBATCH_BYTES = 1000
"""What stands for a microbatch on one stage where nobody says how large it is; W may need a share of it."""


@dataclass(frozen=True)
class StageTimes:
    """What the command line says of the stages: times in seconds, one for all or one a stage.

    Attributes:
        forward_s: of F.
        input_s: of I.
        weight_s: of W.
        activation_bytes: what a stage keeps of a microbatch; None where it is not said, and a stage then
            keeps `MICROBATCH_BYTES`, so that memory is counted in microbatches.
        weight_share: how much of that W still needs when I is done, from 0 to 1.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    activation_bytes: int | None = None
    weight_share: float = 1.0

    def costs(self, stages: int, divided_by: int = 1) -> tuple[StageCost, ...]:
        """The cost of each stage; times and sizes are those of `divided_by` stages together."""
        each = [
            self._of_stages(option, values, stages, divided_by)
            for option, values in (("--f", self.forward_s), ("--i", self.input_s), ("--w", self.weight_s))
        ]
        kept = MICROBATCH_BYTES if self.activation_bytes is None else self.activation_bytes // divided_by
        return tuple(
            StageCost(
                forward_s=forward,
                backward_s=input_s + weight,
                backward_input_s=input_s,
                backward_weight_s=weight,
                activation_bytes=kept,
                weight_activation_bytes=round(kept * self.weight_share),
            )
            for forward, input_s, weight in zip(*each, strict=True)
        )

    @staticmethod
    def _of_stages(option: str, values: tuple[float, ...], stages: int, divided_by: int) -> tuple[float, ...]:
        if len(values) == 1:
            return (values[0] / divided_by,) * stages
        if len(values) != stages:
            raise UsageError(f"{option} has {len(values)} times for {stages} stages: give one or {stages}")
        return values


@dataclass(frozen=True)
class ScheduleCase:
    """A schedule to make and simulate.

    Attributes:
        name: of the schedule.
        make: makes it; ScheduleError where it can't serve these numbers.
        costs: one a stage.
        cluster: the links.
    """

    name: str
    make: Callable[[], Schedule]
    costs: tuple[StageCost, ...]
    cluster: Cluster | None


@dataclass(frozen=True)
class SimulatedSchedule:
    """A schedule and its simulated step."""

    case: ScheduleCase
    schedule: Schedule
    simulation: Simulation


def schedule_kinds(names: str) -> tuple[ScheduleKind, ...]:
    """The kinds that ``--schedule`` names, each once: names between commas, ``all`` for those that train.

    Raises:
        UsageError: no name.
        ScheduleError: an unknown one; the message has the names of all.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UsageError(
            f"--schedule is {names!r}: give all, or one or more of {', '.join(schedule_names())}"
        )
    kinds: list[ScheduleKind] = []
    for name in wanted:
        is_all = name.lower() == "all"
        kinds += (
            (kind for kind in map(get_schedule, schedule_names()) if kind.trains)
            if is_all
            else [get_schedule(name)]
        )
    return tuple(dict.fromkeys(kinds))


def stages_a_rank(kind: ScheduleKind) -> int:
    """How many stages a rank has where nobody says: what the schedule was thought out for."""
    return kind.stages_a_rank


def cases_from_times(
    kinds: Sequence[ScheduleKind],
    times: StageTimes,
    cluster: Cluster,
    *,
    stages: int | None,
    microbatches: int,
    memory: float | None,
) -> list[ScheduleCase]:
    """The cases for stages whose times are given.

    Args:
        kinds: the schedules.
        times: of a stage; of all the stages of a rank together where `stages` is None.
        cluster: ranks and links.
        stages: how many; None for as many as each schedule was thought out for.
        microbatches: how many a step has.
        memory: what a rank may hold, in bytes, or in microbatches where `times` has no sizes.
    """
    cases = []
    for kind in kinds:
        each = stages_a_rank(kind) if stages is None else stages // cluster.ranks
        count = cluster.ranks * each
        costs = times.costs(count, each if stages is None else 1)
        limit = memory
        if memory is not None and times.activation_bytes is None:
            limit = memory * each * MICROBATCH_BYTES  # a rank's stages together keep a microbatch
        make = partial(
            kind,
            count,
            microbatches,
            cluster.ranks,
            costs=costs,
            cluster=cluster,
            memory_bytes=None if limit is None else int(limit),
        )
        cases.append(ScheduleCase(kind.name, make, costs, cluster))
    return cases


def cases_from_plan(
    plan: Plan, names: str | None, *, microbatches: int | None, memory: int | None
) -> list[ScheduleCase]:
    """The cases for the stages, the placement and the cluster of a plan.

    Args:
        plan: the plan.
        names: as in `schedule_kinds`; None for the plan's own schedule. An order that was made for the plan
            is among all, and may be named.
        microbatches: how many a step has; None for as many as the plan.
        memory: what a rank may hold, in bytes; None for what it may in the plan's cluster.
    """
    costs = stage_costs(plan)
    limit = memory if memory is not None or plan.cluster is None else plan.cluster.memory_bytes
    count = microbatches or plan.microbatches
    has_own, wanted = _wanted(plan, names, count)
    cases = []
    if has_own:
        cases.append(ScheduleCase(plan.schedule, partial(_own_order, plan, count), costs, plan.cluster))
    for kind in schedule_kinds(",".join(wanted)) if wanted or not has_own else ():
        make = partial(
            kind,
            len(plan.stages),
            count,
            placement=plan.placement,
            costs=costs,
            cluster=plan.cluster,
            memory_bytes=limit,
        )
        cases.append(ScheduleCase(kind.name, make, costs, plan.cluster))
    return cases


def _wanted(plan: Plan, names: str | None, microbatches: int) -> tuple[bool, list[str]]:
    """Whether the plan's own order is simulated, and the names of what is simulated besides."""
    wanted = [] if names is None else [name.strip() for name in names.split(",") if name.strip()]
    if plan.schedule not in schedule_names():  # an order that was made for the plan
        others = [name for name in wanted if name.lower() != plan.schedule.lower()]
        return names is None or "all" in map(str.lower, wanted) or len(others) < len(wanted), others
    if names is None and microbatches != plan.microbatches:
        return False, [plan.schedule]
    return names is None, wanted


def _own_order(plan: Plan, microbatches: int) -> Schedule:
    if microbatches != plan.microbatches:
        raise ScheduleError(
            f"{plan.schedule} is an order that was made for the plan's {plan.microbatches} microbatches, and "
            f"--microbatches is {microbatches}: plan again with as many, or give --schedule all"
        )
    return schedule_of(plan)


def simulate_cases(
    cases: Sequence[ScheduleCase], progress: Callable[[float], None]
) -> tuple[list[SimulatedSchedule], dict[str, str]]:
    """Simulate each case.

    Returns:
        What could be simulated, and for the other names why not.

    Raises:
        ScheduleError: none could; where there was one case, it is that one's own error.
    """
    simulated: list[SimulatedSchedule] = []
    refused: dict[str, str] = {}
    for number, case in enumerate(cases):
        progress(number / len(cases))
        try:
            schedule = case.make()
            simulation = simulate(schedule, case.costs, case.cluster)
        except PlanError as error:
            if len(cases) == 1:
                raise
            refused[case.name] = str(error)
            continue
        simulated.append(SimulatedSchedule(case, schedule, simulation))
    if not simulated:
        first = next(iter(refused))
        raise ScheduleError(f"none of the {len(cases)} schedules can be made: {first}: {refused[first]}")
    return simulated, refused
