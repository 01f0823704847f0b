"""The schedules, under the names of ``torch.distributed.pipelining.schedules``; and `CustomSchedule`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from partita.errors import ScheduleError
from partita.pipelining.steps.running.custom_functions import CustomFunction as _CustomFunctionProtocol
from partita.pipelining.steps.running.custom_functions import PipelineContext as _PipelineContext
from partita.pipelining.steps.schedule_bases import PipelineScheduleMulti, PipelineScheduleSingle
from partita.pipelining.steps.schedule_bases import PipelineScheduleRuntime as _PipelineScheduleRuntime
from partita.pipelining.steps.schedule_kinds import (
    CustomSchedule,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from partita.pipelining.steps.schedule_kinds import ScheduleForwardOnly as _ScheduleForwardOnly
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.planning import Action as _Action
from partita.planning import ActionKind as _ComputationType
from partita.planning import Schedule, lower, merge_backward, validate, with_reduce_grad, with_unshard

__all__ = [
    "CustomSchedule",
    "PipelineSchedule",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "_Action",
    "_ComputationType",
    "_CustomFunctionProtocol",
    "_PipelineContext",
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
    "_ScheduleForwardOnly",
    "_add_reduce_grad",
    "_add_send_recv",
    "_add_unshard_reshard",
    "_format_pipeline_order",
    "_merge_bw",
    "_validate_schedule",
    "get_schedule_class",
]

FORWARD = F = _ComputationType.F
BACKWARD_INPUT = I = _ComputationType.I  # noqa: E741 - torch's
BACKWARD_WEIGHT = W = _ComputationType.W
FULL_BACKWARD = B = _ComputationType.B
OVERLAP_F_B = _ComputationType.OVERLAP_F_B
SEND_F = _ComputationType.SEND_F
RECV_F = _ComputationType.RECV_F
SEND_B = _ComputationType.SEND_B
RECV_B = _ComputationType.RECV_B
UNSHARD = _ComputationType.UNSHARD
RESHARD = _ComputationType.RESHARD
REDUCE_GRAD = _ComputationType.REDUCE_GRAD

_PipelineSchedule = PipelineSchedule

_Order = Mapping[int, Sequence[Any]]
"""The actions of each rank: `planning.Action`s, their text or torch's own; None where the rank idles."""


def _add_send_recv(
    compute_actions: _Order, stage_to_rank: Callable[[int], int], num_stages: int
) -> dict[int, list[_Action]]:
    """Add the sends and receives of a pipeline in which each stage feeds the next; see `planning.lower`.

    >>> _add_send_recv({0: ["0F0"], 1: ["1F0"]}, lambda stage: stage, 2)[1]  # doctest: +ELLIPSIS
    [Action(stage=1, kind=<ActionKind.RECV_F: 'RECV_F'>, microbatch=0, ...), Action(stage=1, ...)]

    Raises:
        ScheduleError: as `planning.validate`.
    """
    stage_ranks = [stage_to_rank(stage) for stage in range(num_stages)]
    lowered = lower(_schedule_of(compute_actions, stage_ranks=stage_ranks))
    return {rank: list(lowered.actions(rank)) for rank in range(lowered.ranks)}


def _validate_schedule(
    actions: _Order, pp_group_size: int, num_stages: int, num_microbatches: int
) -> dict[int, int]:
    """Check the actions with `planning.validate`.

    Returns:
        The rank of each stage.

    Raises:
        ScheduleError: another number of ranks or stages, or what `planning.validate` refuses.
    """
    schedule = _schedule_of(actions, microbatches=num_microbatches)
    for actual, expected, what in (
        (schedule.ranks, pp_group_size, "ranks"),
        (schedule.stages, num_stages, "stages"),
    ):
        if actual != expected:
            raise ScheduleError(f"the actions are for {actual} {what}, not {expected}: give those of each")
    validate(schedule)
    return dict(enumerate(schedule.stage_ranks))


def _add_unshard_reshard(
    compute_actions: Sequence[_Action | None], max_active_stages: int = 3
) -> list[_Action]:
    """Call `planning.with_unshard` for one rank."""
    return list(with_unshard(compute_actions, max_active_stages))


def _add_reduce_grad(actions: Sequence[_Action | None], n_microbatches: int) -> list[_Action]:
    """Call `planning.with_reduce_grad` for one rank."""
    return list(with_reduce_grad(actions, n_microbatches))


def _merge_bw(compute_actions: Sequence[_Action | None]) -> list[_Action]:
    """Call `planning.merge_backward` for one rank."""
    return list(merge_backward(compute_actions))


def _format_pipeline_order(pipeline_order: _Order, error_step_number: int | None = None) -> str:
    """A table of the actions: a column for each rank, a line for each position.

    >>> print(_format_pipeline_order({0: ["0F0", "0F1"], 1: [None, "1F0"]}, error_step_number=1))
            Rank 0 Rank 1
    Step 0: 0F0
    Step 1: 0F1    1F0    <-- here
    """
    rows = [(f"Rank {rank}", *row) for rank, row in sorted(pipeline_order.items())]
    table = [
        (
            f"Step {step}:" if step >= 0 else "",
            *("" if cell is None else str(cell) for cell in cells),
            "<-- here" if step == error_step_number else "",
        )
        for step, cells in enumerate(zip_longest(*rows), start=-1)
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (" ".join(map(str.ljust, cells, widths)).rstrip() for cells in table)
    return "\n".join(lines)


def _schedule_of(
    order: _Order, *, stage_ranks: Sequence[int] | None = None, microbatches: int | None = None
) -> Schedule:
    if sorted(order) != list(range(len(order))):
        raise ScheduleError(f"the ranks are {sorted(order)}: give the actions of each, counted from 0")
    rows = (",".join("" if cell is None else str(cell) for cell in order[rank]) for rank in range(len(order)))
    text = "".join(f"{row}\n" for row in rows)
    return Schedule.from_csv(text, name="given", stage_ranks=stage_ranks, microbatches=microbatches)
