"""What ``partita simulate`` is asked for, and what it compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.cli.options.machines import Machines
from partita.cli.options.quantities import (
    parse_bytes,
    parse_count,
    parse_seconds,
    parse_seconds_list,
    parse_share,
)
from partita.cli.options.schedule_cases import (
    MICROBATCH_BYTES,
    ScheduleCase,
    SimulatedSchedule,
    StageTimes,
    cases_from_plan,
    cases_from_times,
    schedule_kinds,
)
from partita.cli.options.schedule_file import read_schedule_file
from partita.cli.output.step_report import step_report
from partita.errors import UsageError
from partita.planning import Cluster, Plan, Schedule, validate
from partita.planning.generators.making.arguments import check_step_size
from partita.reporting import CandidateRow, MemoryUnit, PlanReport, chrome_trace, simulation_timeline

__all__ = ["SimulateOptions", "SimulationSubject"]


@dataclass(frozen=True)
class SimulationSubject:
    """What is simulated, and how its memory is counted; what each rank may hold of it."""

    cases: list[ScheduleCase]
    unit: MemoryUnit
    limits: tuple[float | None, ...]
    title: str

    def peak(self, one: SimulatedSchedule) -> float:
        """The most that a rank holds, in the unit."""
        return max(one.simulation.peak_bytes) / self.divided_by(one)

    def divided_by(self, one: SimulatedSchedule) -> float:
        """How many bytes of the simulation are one of the unit."""
        if self.unit == "bytes":
            return 1.0
        return MICROBATCH_BYTES * one.schedule.stages / one.schedule.ranks

    def fits(self, one: SimulatedSchedule) -> bool:
        """Whether each rank is within its limit."""
        peaks = [peak / self.divided_by(one) for peak in one.simulation.peak_bytes]
        return all(limit is None or peak <= limit for peak, limit in zip(peaks, self.limits, strict=False))

    def order(self, one: SimulatedSchedule) -> tuple[bool, float, float]:
        """What fits comes first, then what is faster, then what holds less."""
        return not self.fits(one), one.simulation.makespan_s, self.peak(one)

    def row(self, one: SimulatedSchedule) -> CandidateRow:
        """A row of the table."""
        step = one.simulation
        times = step.makespan_s, step.bubble, step.span_s, step.span_bubble
        return CandidateRow(one.case.name, one.schedule.stages, *times, self.peak(one), self.fits(one))

    def report(self, ranked: list[SimulatedSchedule], refused: dict[str, str]) -> PlanReport:
        """The page of the first of these."""
        best = ranked[0]
        schedule = best.schedule
        return step_report(
            best.simulation,
            [self.row(one) for one in ranked],
            title=self.title,
            subtitle=f"{schedule.ranks} ranks, {schedule.microbatches} microbatches, "
            f"{len(ranked)} {'schedule' if len(ranked) == 1 else 'schedules'} simulated",
            unit=self.unit,
            limits=self.limits[: schedule.ranks],
            divided_by=self.divided_by(best),
            left_out=refused,
        )

    def trace(self, one: SimulatedSchedule) -> str:
        """The step as a Chrome trace, with memory where it is known in bytes."""
        timeline = simulation_timeline(one.simulation, one.case.name, transfers=True)
        memory = [dict(enumerate(one.simulation.memory))] if self.unit == "bytes" else []
        return chrome_trace([timeline], memory=memory)

    def as_dict(self, ranked: list[SimulatedSchedule], refused: dict[str, str]) -> dict[str, Any]:
        """All that was simulated, as plain values."""
        return {
            "best": ranked[0].case.name,
            "memory_limit": min((limit for limit in self.limits if limit is not None), default=None),
            "memory_limits": list(self.limits),
            "memory_unit": self.unit,
            "schedules": [
                {
                    "schedule": one.case.name,
                    "stages": one.schedule.stages,
                    "ranks": one.schedule.ranks,
                    "microbatches": one.schedule.microbatches,
                    "makespan_s": one.simulation.makespan_s,
                    "bubble": one.simulation.bubble,
                    "span_s": one.simulation.span_s,
                    "span_bubble": one.simulation.span_bubble,
                    "peak": self.peak(one),
                    "fits": self.fits(one),
                }
                for one in ranked
            ],
            "left_out": refused,
        }


@dataclass(frozen=True)
class SimulateOptions:
    """The options, as typed."""

    ranks: int | None
    stages: int | None
    microbatches: int | None
    schedule: str | None
    times: tuple[str | None, str | None, str | None]
    comm: str | None
    activation: str | None
    weight_activation: str | None
    memory: str | None

    def __post_init__(self) -> None:
        for name in ("ranks", "stages", "microbatches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} is {value}: give 1 or more")
        check_step_size("a step", self.stages or self.ranks or 1, self.microbatches or 1)

    def of_times(self) -> SimulationSubject:
        """Stages whose times are given."""
        if self.ranks is None:
            raise UsageError("there is neither a file nor --ranks: give one, such as --ranks 8")
        if self.stages is not None and self.stages % self.ranks:
            near = max(1, self.stages // self.ranks) * self.ranks
            raise UsageError(
                f"--stages is {self.stages} on {self.ranks} ranks: give a multiple of the ranks, such as "
                f"{near} or {near + self.ranks}"
            )
        kinds = schedule_kinds("all" if self.schedule is None else self.schedule)
        unit, limit = self._memory()
        cases = cases_from_times(
            kinds,
            self._stage_times(),
            self._cluster(self.ranks),
            stages=self.stages,
            microbatches=self.microbatches or 8,
            memory=limit,
        )
        return SimulationSubject(cases, unit, (limit,) * self.ranks, "Schedules of a pipeline")

    def of_file(self, path: Path) -> SimulationSubject:
        """A plan, or a schedule."""
        _refuse(path, {"--stages": self.stages})
        read = read_schedule_file(path)
        return self._of_plan(read, path) if isinstance(read, Plan) else self._of_schedule(read)

    def _of_schedule(self, schedule: Schedule) -> SimulationSubject:
        _refuse("a schedule", {"--schedule": self.schedule, "--microbatches": self.microbatches})
        validate(schedule)
        unit, limit = self._memory()
        costs = self._stage_times().costs(schedule.stages)
        case = ScheduleCase(
            schedule.name, lambda: schedule, costs, self._cluster(self.ranks or schedule.ranks)
        )
        return SimulationSubject([case], unit, (limit,) * schedule.ranks, schedule.name)

    def _of_plan(self, plan: Plan, path: Path) -> SimulationSubject:
        own = (*self.times, self.comm, self.activation, self.weight_activation)
        names = ("--f", "--i", "--w", "--comm", "--activation", "--weight-activation")
        _refuse(path, dict(zip(names, own, strict=True)))
        limit = None
        if self.memory is not None:
            machines = Machines(memory=self.memory)
            limit = machines.memory_bytes
            heaviest = max(plan.stages, key=lambda stage: stage.parameter_bytes)
            machines.refuse_forgotten_unit(f"stage {heaviest.index}", heaviest.parameter_bytes)
        if self.ranks is not None and self.ranks < plan.ranks:
            raise UsageError(f"--ranks is {self.ranks}, and the plan needs {plan.ranks}: give it as many")
        cases = cases_from_plan(plan, self.schedule, microbatches=self.microbatches, memory=limit)
        limits = tuple(
            plan.cluster.memory(rank) if limit is None and plan.cluster is not None else limit
            for rank in range(plan.ranks)
        )
        return SimulationSubject(cases, "bytes", limits, str(path))

    def _memory(self) -> tuple[MemoryUnit, float | None]:
        if self.activation is not None:
            return "bytes", Machines(memory=self.memory).memory_bytes
        if self.memory is None:
            return "microbatches", None
        if not self.memory.strip().replace(".", "", 1).isdigit():
            raise UsageError(
                f"--memory is {self.memory!r:.40} and --activation is not given: give a number of "
                "microbatches, such as 4.5, or say with --activation what a stage keeps of one"
            )
        return "microbatches", parse_count(self.memory, "--memory")

    def _stage_times(self) -> StageTimes:
        f, i, w = self.times
        forward = parse_seconds_list("1ms" if f is None else f, "--f")
        return StageTimes(
            forward,
            forward if i is None else parse_seconds_list(i, "--i"),
            forward if w is None else parse_seconds_list(w, "--w"),
            None if self.activation is None else parse_bytes(self.activation, "--activation"),
            1.0
            if self.weight_activation is None
            else parse_share(self.weight_activation, "--weight-activation"),
        )

    def _cluster(self, ranks: int) -> Cluster:
        return Cluster(ranks, latency_s=0.0 if self.comm is None else parse_seconds(self.comm, "--comm"))


def _refuse(what: Path | str, options: Mapping[str, object]) -> None:
    """Refuse those of these options that have a value, for what has its own."""
    named = [name for name, value in options.items() if value is not None]
    if named:
        are, them = ("is", "it") if len(named) == 1 else ("are", "them")
        raise UsageError(
            f"{' and '.join(named)} {are} given with {what}, which has its own: leave {them} out"
        )
