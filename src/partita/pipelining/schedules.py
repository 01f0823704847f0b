"""The schedules under the names of ``torch.distributed.pipelining.schedules``, for programs that change the
import.
"""

from __future__ import annotations

from partita.pipelining.steps.schedule_bases import PipelineScheduleMulti, PipelineScheduleSingle
from partita.pipelining.steps.schedule_bases import PipelineScheduleRuntime as _PipelineScheduleRuntime
from partita.pipelining.steps.schedule_kinds import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from partita.pipelining.steps.schedules import PipelineSchedule as _PipelineSchedule
from partita.planning import Action as _Action
from partita.planning import ActionKind as _ComputationType

__all__ = [
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
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
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
