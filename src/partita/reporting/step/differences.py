"""Why a step took longer, or shorter, than it was simulated: computing, waiting, messages and Python.

A rank's time in a step is all of these together, on both sides, so that the differences add up::

    measured   [F0]·[F1]..m[B0]···      computing  [..]   waiting  ···   starting messages  m   Python  .
    simulated  [F0][F1]··[B0]··         computing  [..]   waiting  ···
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.reporting.drawing.units import format_seconds, format_share
from partita.reporting.step.data import Timeline, TimelineSpan

__all__ = [
    "ActionRow",
    "StepDifferences",
    "TimeUse",
    "differences_text",
    "signed_seconds",
    "step_differences",
    "time_use",
]


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Where a rank's seconds of a step went. They add up to the step.

    Args:
        rank: which one.
        computing_s: in passes.
        waiting_s: for messages, and at the end for the other ranks.
        messages_s: spent on starting sends and receives.
        python_s: between all that.
    """

    rank: int
    computing_s: float
    waiting_s: float
    messages_s: float
    python_s: float

    @property
    def total_s(self) -> float:
        """The step."""
        return self.computing_s + self.waiting_s + self.messages_s + self.python_s


@dataclass(frozen=True, slots=True)
class ActionRow:
    """One kind of pass of one stage: means over its microbatches, in seconds.

    Args:
        stage: which one.
        kind: ``F``, ``B``, ``I`` or ``W``.
        count: how many were measured.
        simulated_s: what the simulation took it to take.
        computing_s: what it took.
        simulated_wait_s: what its rank was simulated to wait before it.
        waiting_s: what it waited.
        python_s: what starting messages and Python took before it.
    """

    stage: int
    kind: str
    count: int
    simulated_s: float
    computing_s: float
    simulated_wait_s: float
    waiting_s: float
    python_s: float

    @property
    def difference_s(self) -> float:
        """By how much all of its passes together made the step of its rank longer."""
        own = self.computing_s + self.waiting_s + self.python_s
        return self.count * (own - self.simulated_s - self.simulated_wait_s)


@dataclass(frozen=True, slots=True)
class StepDifferences:
    """A measured step beside the simulated one.

    Args:
        measured: for each rank.
        simulated: for each rank.
        actions: for each stage and kind of pass.
    """

    measured: tuple[TimeUse, ...]
    simulated: tuple[TimeUse, ...]
    actions: tuple[ActionRow, ...]

    @property
    def causes(self) -> tuple[tuple[str, float], ...]:
        """What made the step longer (or shorter, where negative), in seconds: means over the ranks, which add
        up to the difference of the steps.
        """
        names = {
            "computing": "computing_s",
            "waiting": "waiting_s",
            "starting messages": "messages_s",
            "Python": "python_s",
        }
        return tuple(
            (words, self._mean_of(self.measured, name) - self._mean_of(self.simulated, name))
            for words, name in names.items()
        )

    @staticmethod
    def _mean_of(uses: Sequence[TimeUse], name: str) -> float:
        return _mean(getattr(use, name) for use in uses)


def step_differences(measured: Timeline, simulated: Timeline) -> StepDifferences | None:
    """Compare two timelines of the same step; None where they are of other ranks, or one has no passes."""
    if not measured.ranks or measured.ranks != simulated.ranks:
        return None
    ours, theirs = _by_kind(measured), _by_kind(simulated)
    shared = [key for key in ours if key in theirs]
    if not shared:
        return None
    return StepDifferences(
        tuple(time_use(measured, rank) for rank in measured.ranks),
        tuple(time_use(simulated, rank) for rank in simulated.ranks),
        tuple(_action_row(key, ours[key], theirs[key]) for key in sorted(shared, key=_in_order)),
    )


def differences_text(differences: StepDifferences, measured: Timeline, simulated: Timeline) -> str:
    """Say in a sentence or two by how much the step differs, and what it comes from."""
    gap = measured.makespan_s - simulated.makespan_s
    share = f" ({format_share(abs(gap) / simulated.makespan_s)})" if simulated.makespan_s else ""
    way = "longer" if gap >= 0 else "shorter"
    causes = sorted(differences.causes, key=lambda cause: -abs(cause[1]))
    parts = ", ".join(f"{words} {signed_seconds(seconds)}" for words, seconds in causes)
    return (
        f"The measured step is {format_seconds(abs(gap))}{share} {way} than the simulated one. "
        f"On average over the ranks: {parts}."
    )


def signed_seconds(seconds: float) -> str:
    """Return seconds with their sign.

    >>> signed_seconds(-0.0021), signed_seconds(0.0)
    ('−2.10 ms', '+0 ms')
    """
    return f"{'−' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def time_use(timeline: Timeline, rank: int) -> TimeUse:
    """Add up where a rank's time went. Where no waiting was recorded, as in a simulation, it is the rest."""
    own = [span for span in timeline.spans if span.rank == rank]
    computing, messages = _seconds(own, is_compute=True), _seconds(own, kind="handling")
    end = max((span.end_s for span in own if span.kind != "comm"), default=0.0)
    if not any(span.kind == "idle" for span in timeline.spans):
        return TimeUse(rank, computing, max(0.0, timeline.makespan_s - computing - messages), messages, 0.0)
    waiting = _seconds(own, kind="idle") + max(0.0, timeline.makespan_s - end)
    rest = timeline.makespan_s - computing - messages - waiting
    return TimeUse(rank, computing, waiting, messages, max(0.0, rest))


@dataclass(frozen=True, slots=True)
class _Pass:
    computing_s: float
    waiting_s: float
    python_s: float


def _by_kind(timeline: Timeline) -> dict[tuple[int, str], list[_Pass]]:
    """The passes of each stage and kind, each with what lay between it and the one before."""
    passes: defaultdict[tuple[int, str], list[_Pass]] = defaultdict(list)
    records_waits = any(span.kind == "idle" for span in timeline.spans)
    for rank in timeline.ranks:
        own = sorted((span for span in timeline.spans if span.rank == rank), key=lambda span: span.start_s)
        done_s, waited_s = 0.0, 0.0
        for span in own:
            if span.kind == "idle":
                waited_s += span.duration_s
            if not span.is_compute:
                continue
            gap = max(0.0, span.start_s - done_s)
            waited = waited_s if records_waits else gap
            if span.stage is not None:  # passes that run together have none
                one = _Pass(span.duration_s, waited, max(0.0, gap - waited))
                passes[span.stage, span.kind].append(one)
            done_s, waited_s = span.end_s, 0.0
    return dict(passes)


def _action_row(key: tuple[int, str], ours: Sequence[_Pass], theirs: Sequence[_Pass]) -> ActionRow:
    stage, kind = key
    return ActionRow(
        stage,
        kind,
        len(ours),
        _mean(item.computing_s for item in theirs),
        _mean(item.computing_s for item in ours),
        _mean(item.waiting_s for item in theirs),
        _mean(item.waiting_s for item in ours),
        _mean(item.python_s for item in ours),
    )


def _in_order(key: tuple[int, str]) -> tuple[int, int]:
    stage, kind = key
    return stage, "FBIW".find(kind[:1])


def _seconds(spans: Iterable[TimelineSpan], *, is_compute: bool = False, kind: str = "") -> float:
    return sum(span.duration_s for span in spans if (span.is_compute if is_compute else span.kind == kind))


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every) if every else 0.0
