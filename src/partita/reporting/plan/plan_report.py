"""A plan, or the comparison of some schedules, as frozen data for a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from partita.errors import ReportError
from partita.reporting.drawing.checks import require_quantity
from partita.reporting.plan.candidates import CandidateRow, MemoryUnit
from partita.reporting.step.data import Figure, Timeline

__all__ = ["CutRow", "GainRow", "MemoryLane", "PlanReport", "PlannedStageRow"]


@dataclass(frozen=True, slots=True)
class PlannedStageRow:
    """One stage of a plan. Times and bytes sent or kept are those of one microbatch.

    Args:
        stage: its number, from 0.
        rank: the rank that runs it.
        modules: names of what it holds, best shortened by `partita.reporting.summarise_modules`.
        parameters: how many numbers its parameters hold.
        parameter_bytes: their size.
        forward_s: seconds of F.
        backward_s: seconds of B, what is computed again included.
        input_s: seconds of I; None where B is not divided.
        weight_s: seconds of W; likewise.
        kept_bytes: kept from forward to backward.
        static_bytes: there all the time: parameters, gradients, optimizer state.
        send_bytes: sent on to later stages.
        recomputed: what is computed again in the backward pass, in words; may be empty.

    Raises:
        ReportError: a quantity is negative or not finite.
    """

    stage: int
    rank: int
    modules: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    forward_s: float
    backward_s: float
    input_s: float | None
    weight_s: float | None
    kept_bytes: int
    static_bytes: int
    send_bytes: int
    recomputed: str = ""

    def __post_init__(self) -> None:
        for name in ("stage", "rank", "parameters", "parameter_bytes", "kept_bytes", "static_bytes"):
            require_quantity("PlannedStageRow", name, getattr(self, name))
        for name in ("forward_s", "backward_s", "send_bytes"):
            require_quantity("PlannedStageRow", name, getattr(self, name))

    @property
    def time_s(self) -> float:
        """Seconds that one microbatch spends in the stage."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class CutRow:
    """One cut: what crosses it, and why it is there.

    Args:
        stage: the stage that ends there.
        before: name of the last module before it, or of the last unit.
        after: name of the first module after it, or of the first unit.
        crossing_bytes: what one microbatch carries across.
        transfer_s: seconds that this takes; 0 where both stages lie on one rank.
        ranks: the ranks on both sides.
        reason: why it is there, or an empty text.
        other: the next best place, or an empty text.
    """

    stage: int
    before: str
    after: str
    crossing_bytes: int
    transfer_s: float
    ranks: tuple[int, int]
    reason: str = ""
    other: str = ""

    def __post_init__(self) -> None:
        for name in ("stage", "crossing_bytes", "transfer_s"):
            require_quantity("CutRow", name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class MemoryLane:
    """What a rank holds over a step.

    Args:
        rank: which one.
        steps: pairs (seconds from which on, amount), in order of time.
        limit: what it may hold; None where there is no limit.

    Raises:
        ReportError: no steps, times out of order, or an amount that is negative or not finite.
    """

    rank: int
    steps: tuple[tuple[float, float], ...]
    limit: float | None = None

    def __post_init__(self) -> None:
        if not self.steps:
            raise ReportError(
                f"MemoryLane of rank {self.rank} has no steps: give what it holds at the start."
            )
        last_s = 0.0
        for time_s, amount in self.steps:
            require_quantity("MemoryLane", "amount", amount)
            require_quantity("MemoryLane", "time_s", time_s)
            if time_s < last_s:
                raise ReportError(
                    f"MemoryLane of rank {self.rank} goes back from {last_s} s to {time_s} s; sort its steps."
                )
            last_s = time_s

    @property
    def peak(self) -> float:
        """The most that it holds."""
        return max(amount for _, amount in self.steps)


@dataclass(frozen=True, slots=True)
class GainRow:
    """What a change would bring.

    Args:
        what: the change, such as "one more rank".
        makespan_s: seconds of a step with it; None where it can't be done.
        peak: the most that a rank then holds, in the report's unit; None likewise.
        note: what else there is to say.
    """

    what: str
    makespan_s: float | None
    peak: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All that the page of a plan shows. Empty parts are left out.

    Args:
        title: the heading.
        subtitle: the line below it.
        figures: key figures, most important first.
        timeline: one simulated step of the chosen candidate.
        memory: what each rank holds during that step.
        unit: of all memory in the report.
        stages: of the plan.
        cuts: between them.
        candidates: all that were simulated, best first; the first is the chosen one.
        left_out: what was tried and can't be done: pairs (name, reason).
        gains: what changes would bring.
        critical: where the time of the step goes: pairs (what, seconds), which add up to the step.
        environment: names and values that describe what was planned for. Copied, and read-only afterwards.
    """

    title: str
    subtitle: str
    figures: tuple[Figure, ...]
    timeline: Timeline
    memory: tuple[MemoryLane, ...] = ()
    unit: MemoryUnit = "bytes"
    stages: tuple[PlannedStageRow, ...] = ()
    cuts: tuple[CutRow, ...] = ()
    candidates: tuple[CandidateRow, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    gains: tuple[GainRow, ...] = ()
    critical: tuple[tuple[str, float], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "environment", MappingProxyType(dict(self.environment)))
