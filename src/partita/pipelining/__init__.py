"""Pipeline parallelism: stages of one model on several ranks."""

from __future__ import annotations

from partita.pipelining.cuts import SplitPoint, pipe_split
from partita.pipelining.frontend import keyed_graph, measure_units, pipeline
from partita.pipelining.pipe import Pipe
from partita.pipelining.reference import UncutReference
from partita.pipelining.schedules import PipelineSchedule, Schedule1F1B, ScheduleGPipe, get_schedule_class
from partita.pipelining.stage import PipelineStage
from partita.runtime import TensorChunkSpec

__all__ = [
    "Pipe",
    "PipelineSchedule",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleGPipe",
    "SplitPoint",
    "TensorChunkSpec",
    "UncutReference",
    "get_schedule_class",
    "keyed_graph",
    "measure_units",
    "pipe_split",
    "pipeline",
]
