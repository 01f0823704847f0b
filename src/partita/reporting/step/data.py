"""What a report shows, as frozen data: no tensors, no processes, nothing that JSON can't hold.

Whoever ran something fills these in; the text, HTML and trace renderers read them and nothing else. Times
are in seconds, sizes in bytes. Sequences are tuples, so that reports that say the same compare equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from partita.errors import ReportError, ScheduleError
from partita.planning import Action
from partita.reporting.drawing.checks import require_quantity
from partita.reporting.replication.backward_pass import BackwardPass

__all__ = ["Figure", "LossPoint", "RankMemory", "RunReport", "StageRow", "Timeline", "TimelineSpan", "Tone"]

Tone = Literal["plain", "good", "bad"]

# Time spent in these is not work on a microbatch: a rank that is here counts as waiting.
_NOT_COMPUTE = frozenset({"comm", "idle", "handling"})


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of a plan, as its table shows it.

    Args:
        stage: number of the stage, from 0.
        rank: the rank that runs it.
        modules: names of what it holds, best shortened by `partita.reporting.summarise_modules`.
        parameters: how many numbers its parameters hold.
        parameter_bytes: their size in bytes.
        forward_s: seconds of one microbatch's forward.
        backward_s: seconds of one microbatch's backward.
        send_bytes: bytes that one microbatch sends on to later stages.

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
    send_bytes: int

    def __post_init__(self) -> None:
        for name in (
            "stage",
            "rank",
            "parameters",
            "parameter_bytes",
            "forward_s",
            "backward_s",
            "send_bytes",
        ):
            require_quantity("StageRow", name, getattr(self, name))

    @property
    def time_s(self) -> float:
        """Seconds that one microbatch spends in the stage, forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class LossPoint:
    """The loss of both sides at one step. A loss may be NaN or infinite: that is worth showing.

    >>> LossPoint(step=3, pipelined=2.5, reference=2.25).difference
    0.25
    >>> LossPoint(step=3, pipelined=float("nan"), reference=float("nan")).difference
    0.0
    """

    step: int
    pipelined: float
    reference: float

    def __post_init__(self) -> None:
        require_quantity("LossPoint", "step", self.step)

    @property
    def difference(self) -> float:
        """Pipelined minus reference; 0.0 where both are the same NaN or infinity."""
        same = self.pipelined == self.reference or (math.isnan(self.pipelined) and math.isnan(self.reference))
        return 0.0 if same else self.pipelined - self.reference

    @property
    def finite(self) -> bool:
        """Whether both losses are finite numbers."""
        return math.isfinite(self.pipelined) and math.isfinite(self.reference)


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """What a rank did from `start_s` to `end_s`, in seconds since the step began.

    Args:
        rank: who did it.
        label: the action's short text, such as ``"0F3"`` (stage 0, forward, microbatch 3).
        kind: ``"F"``, ``"B"``, ``"I"``, ``"W"``, ``"comm"``, ``"idle"``, ``"handling"`` (starting sends and
            receives), or any other word (drawn in grey).
        stage: the stage it belongs to, or None.
        microbatch: the microbatch it belongs to, or None.
        start_s: when it began.
        end_s: when it ended.

    Raises:
        ReportError: a time is negative or not finite, or the span ends before it starts.
    """

    rank: int
    label: str
    kind: str
    stage: int | None
    microbatch: int | None
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        for name in ("rank", "start_s", "end_s"):
            require_quantity("TimelineSpan", name, getattr(self, name))
        if self.end_s < self.start_s:
            raise ReportError(
                f"TimelineSpan {self.label!r} ends at {self.end_s} s, before it starts ({self.start_s} s); "
                "measure both on the same clock."
            )

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    @property
    def words(self) -> str:
        """What the label stands for, for people; the label itself where that is no action.

        >>> TimelineSpan(1, "1F3", "F", 1, 3, 0.0, 1.0).words
        'stage 1 forward, microbatch 3'
        """
        try:
            return Action.parse(self.label).words
        except ScheduleError:
            return self.label

    @property
    def is_compute(self) -> bool:
        """Whether the rank worked, rather than communicated or waited."""
        return self.kind not in _NOT_COMPUTE


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step on all ranks.

    Args:
        title: what it is, such as ``"Measured"``.
        spans: what each rank did, in any order.
        makespan_s: seconds from the step's start to the end of the last rank.
        bubble: share of the ranks' time that no computation used, from 0 to 1.

    Raises:
        ReportError: `makespan_s` is negative or not finite, or `bubble` lies outside of [0, 1].
    """

    title: str
    spans: tuple[TimelineSpan, ...]
    makespan_s: float
    bubble: float

    def __post_init__(self) -> None:
        require_quantity("Timeline", "makespan_s", self.makespan_s)
        if not 0 <= self.bubble <= 1:
            raise ReportError(f"Timeline.bubble is {self.bubble}; give a share of time, from 0 to 1.")

    @classmethod
    def from_spans(cls, title: str, spans: Iterable[TimelineSpan]) -> Timeline:
        """Make a timeline whose makespan and bubble follow from its spans.

        The makespan is the last end; the bubble is what computation leaves of ranks × makespan. Ranks are
        those that have a span.

        >>> one = TimelineSpan(0, "0F0", "F", 0, 0, 0.0, 1.0)
        >>> two = TimelineSpan(1, "1F0", "F", 1, 0, 1.0, 2.0)
        >>> timeline = Timeline.from_spans("Measured", [one, two])
        >>> timeline.makespan_s, timeline.bubble
        (2.0, 0.5)
        """
        spans = tuple(spans)
        makespan = max((span.end_s for span in spans), default=0.0)
        ranks = len({span.rank for span in spans})
        if makespan == 0:
            return cls(title, spans, makespan, 0.0)
        busy = sum(span.duration_s for span in spans if span.is_compute)
        return cls(title, spans, makespan, min(1.0, max(0.0, 1 - busy / (ranks * makespan))))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a span, in order."""
        return tuple(sorted({span.rank for span in self.spans}))

    @property
    def end_s(self) -> float:
        """When everything is over: the makespan, or the last span's end where that is later."""
        return max(self.makespan_s, *(span.end_s for span in self.spans), 0.0)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The most memory that a rank held.

    Args:
        rank: which one.
        predicted_bytes: by the simulation: parameters, gradients, optimizer, and what F keeps for B.
        measured_bytes: what was seen.
        note: what was measured, and what it has that was not predicted.

    Raises:
        ReportError: a quantity is negative or not finite.
    """

    rank: int
    predicted_bytes: float
    measured_bytes: float
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("rank", "predicted_bytes", "measured_bytes"):
            require_quantity("RankMemory", name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class Figure:
    """A key figure of a report.

    Args:
        name: what it is.
        value: a number (formatted by `partita.reporting.format_number`) or text shown as it is.
        unit: shown after the value; may be empty.
        note: a line below it; may be empty.
        tone: whether it is good or bad news, or just a number.
    """

    name: str
    value: float | str
    unit: str = ""
    note: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class RunReport:
    """Everything that the report of one training run shows.

    Args:
        title: the heading.
        subtitle: the line below it.
        stages: the plan, one row a stage.
        losses: training loss of both sides, in order of steps.
        measured: one step as it ran.
        simulated: the same step as the simulator predicts it.
        figures: key figures, most important first.
        environment: names and values that describe where it ran. Copied, and read-only afterwards.
        validation: losses on data not trained on, at the steps where they were taken; may be empty.
        backward: a data parallel backward pass and its buckets, or None.
        memory: of each rank; may be empty.
    """

    title: str
    subtitle: str
    stages: tuple[StageRow, ...]
    losses: tuple[LossPoint, ...]
    measured: Timeline
    simulated: Timeline
    figures: tuple[Figure, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    validation: tuple[LossPoint, ...] = ()
    backward: BackwardPass | None = None
    memory: tuple[RankMemory, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "environment", MappingProxyType(dict(self.environment)))
