"""What a comparison shows of each run or plan, as frozen data, taken from a report or a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from partita.errors import ReportError
from partita.planning import Plan, schedule_of, simulate
from partita.reporting.step.data import LossPoint, RunReport, Timeline
from partita.reporting.step.simulated import simulation_timeline

__all__ = ["ComparedRun", "Quantity", "RunComparison", "compared_plan", "compared_report"]

QuantityUnit = Literal["seconds", "share", "bytes", "count", "rate", "loss"]


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run that was measured, or a plan that was simulated.

    Args:
        name: as it is called beside the others.
        kind: whether its times were measured or simulated.
        schedule: the order of its passes, by name; may be empty.
        stages: how many.
        timeline: one step.
        predicted: the same step as simulated, of a measured run; None for a plan.
        samples_s: samples a second; None where it is not known.
        tokens_s: tokens a second; None likewise.
        peak_bytes: the most memory of a rank; None likewise.
        losses: of its steps; may be empty.
    """

    name: str
    kind: Literal["measured", "simulated"]
    schedule: str
    stages: int
    timeline: Timeline
    predicted: Timeline | None = None
    samples_s: float | None = None
    tokens_s: float | None = None
    peak_bytes: float | None = None
    losses: tuple[LossPoint, ...] = ()

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        return len(self.timeline.ranks)

    @property
    def last_loss(self) -> float | None:
        """The loss of its last step."""
        return self.losses[-1].pipelined if self.losses else None

    @property
    def prediction_error(self) -> float | None:
        """By which share the measured step is longer than predicted, negative where it is shorter."""
        if self.predicted is None or not self.predicted.makespan_s:
            return None
        return self.timeline.makespan_s / self.predicted.makespan_s - 1


@dataclass(frozen=True, slots=True)
class Quantity:
    """A line of the comparison.

    Args:
        name: what it is.
        unit: of its values.
        values: one a run, None where a run does not have it.
        better: which are better; None where neither is.
    """

    name: str
    unit: QuantityUnit
    values: tuple[float | None, ...]
    better: Literal["less", "more"] | None = None

    @property
    def best(self) -> frozenset[int]:
        """The positions of the best; empty where all are the same, or one is alone."""
        comparable = [value for value in self.values if value is not None]
        if self.better is None or len(comparable) < 2 or min(comparable) == max(comparable):
            return frozenset()
        best = min(comparable) if self.better == "less" else max(comparable)
        return frozenset(place for place, value in enumerate(self.values) if value == best)

    def share(self, place: int) -> float:
        """A value's part of the largest, for a bar."""
        largest = max((value for value in self.values if value is not None), default=0.0)
        value = self.values[place]
        return value / largest if value is not None and largest > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Several runs.

    Args:
        title: the heading.
        runs: two or more, with names of their own.

    Raises:
        ReportError: fewer than two runs, or two of one name.
    """

    title: str
    runs: tuple[ComparedRun, ...]

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise ReportError(f"a comparison of {len(self.runs)} run: give two or more")
        names = [run.name for run in self.runs]
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise ReportError(f"two runs are called {twice!r}: give each a name of its own")

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """All that at least one run has."""
        lines = (
            self._line("Step", "seconds", lambda run: run.timeline.makespan_s, "less"),
            self._line("Bubble", "share", lambda run: run.timeline.bubble, "less"),
            self._line("Samples a second", "rate", lambda run: run.samples_s, "more"),
            self._line("Tokens a second", "rate", lambda run: run.tokens_s, "more"),
            self._line("Memory of the fullest rank", "bytes", lambda run: run.peak_bytes, "less"),
            self._line("Measured beyond simulated", "share", lambda run: run.prediction_error, None),
            self._line("Loss of the last step", "loss", lambda run: run.last_loss, None),
            self._line("Stages", "count", lambda run: float(run.stages), None),
            self._line("Ranks", "count", lambda run: float(run.ranks), None),
        )
        return tuple(line for line in lines if any(value is not None for value in line.values))

    @property
    def losses_differ(self) -> int | None:
        """The first step of all runs whose losses are not all the same; None where there is none."""
        by_step = [{point.step: point.pipelined for point in run.losses} for run in self.runs if run.losses]
        if len(by_step) < 2:
            return None
        shared = sorted(set.intersection(*(set(losses) for losses in by_step)))
        return next((step for step in shared if len({losses[step] for losses in by_step}) > 1), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "title": self.title,
            "runs": [{"name": run.name, "kind": run.kind, "schedule": run.schedule} for run in self.runs],
            "quantities": [
                {"name": line.name, "unit": line.unit, "values": list(line.values), "best": sorted(line.best)}
                for line in self.quantities
            ],
        }

    def _line(
        self,
        name: str,
        unit: QuantityUnit,
        value: Callable[[ComparedRun], float | None],
        better: Literal["less", "more"] | None,
    ) -> Quantity:
        return Quantity(name, unit, tuple(value(run) for run in self.runs), better)


def compared_report(report: RunReport, name: str) -> ComparedRun:
    """Take what a comparison shows from the report of a run."""
    peaks = [row.measured_bytes for row in report.memory]
    return ComparedRun(
        name=name,
        kind="measured",
        schedule=report.environment.get("schedule", ""),
        stages=len(report.stages),
        timeline=report.measured,
        predicted=report.simulated if report.simulated.spans else None,
        samples_s=_first_rate(report, "samples/s"),
        tokens_s=_first_rate(report, "tokens/s"),
        peak_bytes=max(peaks, default=None),
        losses=report.losses,
    )


def compared_plan(plan: Plan, name: str) -> ComparedRun:
    """Simulate a step of a plan, and take what a comparison shows.

    Raises:
        PlanError: the plan can't be simulated.
    """
    simulation = simulate(schedule_of(plan), plan)
    return ComparedRun(
        name=name,
        kind="simulated",
        schedule=plan.schedule,
        stages=len(plan.stages),
        timeline=simulation_timeline(simulation, transfers=True),
        peak_bytes=float(max(simulation.peak_bytes, default=0)) or None,
    )


def _first_rate(report: RunReport, unit: str) -> float | None:
    """The first figure of a unit: the pipelined run's comes before the uncut one's."""
    values: Sequence[float] = [
        figure.value for figure in report.figures if figure.unit == unit and not isinstance(figure.value, str)
    ]
    return values[0] if values else None
