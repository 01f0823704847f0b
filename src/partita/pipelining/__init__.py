"""Pipeline parallelism: stages of one model on several ranks."""

from __future__ import annotations

from partita.pipelining.checkpoint import Restored, load_checkpoint, save_checkpoint
from partita.pipelining.cuts import SplitPoint, pipe_split
from partita.pipelining.frontend import keyed_graph, measure_units, pipeline
from partita.pipelining.materialise import materialise, parameters_on_meta
from partita.pipelining.pipe import Pipe
from partita.pipelining.reference import UncutReference
from partita.pipelining.schedules import PipelineSchedule, Schedule1F1B, ScheduleGPipe, get_schedule_class
from partita.pipelining.stage import PipelineStage
from partita.pipelining.state_report import StateReport, state_report
from partita.pipelining.weight_files import load_safetensors
from partita.runtime import TensorChunkSpec

__all__ = [
    "Pipe",
    "PipelineSchedule",
    "PipelineStage",
    "Restored",
    "Schedule1F1B",
    "ScheduleGPipe",
    "SplitPoint",
    "StateReport",
    "TensorChunkSpec",
    "UncutReference",
    "get_schedule_class",
    "keyed_graph",
    "load_checkpoint",
    "load_safetensors",
    "materialise",
    "measure_units",
    "parameters_on_meta",
    "pipe_split",
    "pipeline",
    "save_checkpoint",
    "state_report",
]
