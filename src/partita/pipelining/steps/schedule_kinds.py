"""The schedules by name, and `CustomSchedule`, which runs one of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from partita.errors import ScheduleError
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.schedule_bases import (
    PipelineScheduleMulti,
    PipelineScheduleRuntime,
    PipelineScheduleSingle,
)
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.planning import Schedule
from partita.runtime.same_settings import short_digest

__all__ = [
    "CustomSchedule",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleForwardOnly",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZB2p",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
]

_Stages = Stage | Sequence[Stage]
_Loss = Callable[..., Tensor] | None


class ScheduleGPipe(PipelineScheduleSingle):
    """All forward passes, then all backward passes (Huang et al. 2019, "GPipe")."""

    kind = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """As soon as a microbatch can go back, it does, so that few are in flight (Narayanan et al. 2020,
    PipeDream-Flush).
    """

    kind = "1F1B"


class ScheduleForwardOnly(PipelineScheduleSingle):
    """Forward passes alone, for inference: `step` is `eval`."""

    kind = "ForwardOnly"


class _SeveralStages(PipelineScheduleRuntime):
    """What torch's schedules for several stages on a rank take, in torch's order."""

    def __init__(
        self,
        stages: _Stages,
        n_microbatches: int,
        loss_fn: _Loss = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
            **options,
        )


class ScheduleLoopedBFS(_SeveralStages):
    """All microbatches through a rank's first stage, then its next; backward from the last (Lamy-Poirier
    2022).
    """

    kind = "LoopedBFS"

    def __init__(
        self,
        stages: _Stages,
        n_microbatches: int,
        loss_fn: _Loss = None,
        output_merge_spec: Any = None,  # no specs for the arguments before it, in torch neither
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
            **options,
        )


class ScheduleInterleaved1F1B(_SeveralStages):
    """1F1B in which a rank takes turns among its stages (Narayanan et al. 2021)."""

    kind = "Interleaved1F1B"


class ScheduleInterleavedZeroBubble(_SeveralStages):
    """Interleaved 1F1B whose idle time is filled with gradients of weights (Qi et al. 2023)."""

    kind = "InterleavedZeroBubble"


class ScheduleZBH1(_SeveralStages):
    """1F1B with a split backward pass: a third of its bubble in the same memory (Qi et al. 2023)."""

    kind = "ZBH1"


class ScheduleZBH2(_SeveralStages):
    """The same with twice the memory of 1F1B, so that no rank idles between its first and its last pass
    where F, I and W take equally long (Qi et al. 2023).
    """

    kind = "ZBH2"


class ScheduleZB2p(_SeveralStages):
    """The automatic zero-bubble schedule, for passes that take equally long and links that take no time (Qi
    et al. 2023). For measured times, give what ``get_schedule("ZB2p")(..., costs=...)`` makes to
    `CustomSchedule`.
    """

    kind = "ZB2p"


class ScheduleZBVZeroBubble(_SeveralStages):
    """A V of stages, two a rank, whose idle time is filled with gradients of weights (Qi et al. 2023): of
    ``n`` ranks, rank ``r`` has stages ``r`` and ``2 * n - 1 - r``.
    """

    kind = "ZBVZeroBubble"


class ScheduleVHalf(_SeveralStages):
    """The same V in about half of the memory of 1F1B (Qi et al. 2024)."""

    kind = "VHalf"


class ScheduleVMin(_SeveralStages):
    """The same V in about a third of the memory of 1F1B (Qi et al. 2024)."""

    kind = "VMin"


class ScheduleDualPipeV(_SeveralStages):
    """The same V, in which the forward pass of one microbatch runs together with the backward pass of another
    (DeepSeek-AI 2024; Sea AI Lab 2025). Needs as many microbatches as stages.
    """

    kind = "DualPipeV"


class CustomSchedule(PipelineSchedule):
    """Runs a schedule of one's own.

    Args:
        schedule: the actions of all ranks, or their text as CSV (torch's files too). Sends and receives are
            kept if they are right for this model's borders, and otherwise replaced.
        options: those of `PipelineSchedule`.

    Raises:
        ScheduleError: it breaks a rule (see `planning.validate`), or has a stage on another rank.

    >>> from partita.planning import Schedule
    >>> mine = Schedule.from_csv("0F0,0F1,,0B0,,0B1\\n,1F0,1B0,1F1,1B1\\n")
    >>> CustomSchedule(stage, mine, loss_fn).step(x, target=y)  # doctest: +SKIP
    """

    def __init__(
        self, stages: _Stages, schedule: Schedule | str, loss_fn: _Loss = None, **options: Any
    ) -> None:
        self._schedule = Schedule.from_csv(schedule) if isinstance(schedule, str) else schedule
        super().__init__(stages, self._schedule.microbatches, loss_fn, **options)

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Its name, and a digest that distinguishes schedules of one name."""
        return f"{self._schedule.name} ({short_digest(self._schedule.to_csv(), 6)})"

    def _generate(self, kind: str) -> Schedule:
        if kind != self.kind:
            return super()._generate(kind)
        own = self._schedule
        for stage, (wanted, actual) in enumerate(zip(own.stage_ranks, self.stage_ranks, strict=False)):
            if wanted != actual:
                raise ScheduleError(
                    f"schedule {own.name!r} has stage {stage} on rank {wanted}, but it was built on rank "
                    f"{actual}: build it there, or move its actions"
                )
        if own.stages != len(self.stage_ranks):
            raise ScheduleError(
                f"schedule {own.name!r} is for {own.stages} stages, but the model was cut into "
                f"{len(self.stage_ranks)}: cut it into as many"
            )
        return own


_KINDS = (
    ScheduleGPipe,
    Schedule1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleZB2p,
    ScheduleZBVZeroBubble,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleDualPipeV,
)


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """Return the class of a schedule, or of torch's bases, by name; the case of letters is ignored.

    Raises:
        ScheduleError: no class has that name.

    >>> get_schedule_class("gpipe").__name__
    'ScheduleGPipe'
    """
    classes: dict[str, type[PipelineSchedule]] = {kind.kind.lower(): kind for kind in _KINDS}
    classes |= {base.__name__.lower(): base for base in (PipelineScheduleSingle, PipelineScheduleMulti)}
    wanted = schedule_name.lower().removeprefix("schedule")
    if wanted not in classes:
        names = ", ".join(kind.kind for kind in _KINDS)
        raise ScheduleError(f"there is no schedule class {schedule_name!r}: choose one of {names}")
    return classes[wanted]
