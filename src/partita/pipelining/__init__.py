"""Pipeline parallelism: stages of one model on several ranks.

What is rarely typed is in modules of its own: the bases of the schedules and `CustomSchedule` in
``schedules``, `Stage`, `PipeInfo` and `to_torch_stage` in ``stages``, types of results in ``checkpoints``.
"""

from __future__ import annotations

from partita.pipelining.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints.latest import latest_checkpoint
from partita.pipelining.checkpoints.pretrained.export_pretrained import export_pretrained
from partita.pipelining.checkpoints.pretrained.import_pretrained import import_pretrained
from partita.pipelining.checkpoints.snapshots import Snapshots
from partita.pipelining.checkpoints.state_report import state_report
from partita.pipelining.checkpoints.weight_files import load_safetensors
from partita.pipelining.decoding.model_call import ModelCall
from partita.pipelining.decoding.run_programs import run_programs
from partita.pipelining.frontends.cuts.annotations import annotate_split_points, clear_split_points
from partita.pipelining.frontends.cuts.cuts import SplitPoint, pipe_split
from partita.pipelining.frontends.cuts.sequential import PipeSequential
from partita.pipelining.frontends.graph.multi_use import MultiUseParameterConfig
from partita.pipelining.frontends.pipe import Pipe
from partita.pipelining.frontends.pipeline import keyed_graph, pipeline
from partita.pipelining.interface.loss import LossWrapper, TrivialLossWrapper
from partita.pipelining.stages.build import build_stage
from partita.pipelining.stages.manual import PipelineStage
from partita.pipelining.stages.materialise import materialise, parameters_on_meta
from partita.pipelining.steps.loss_weights import LossWeights
from partita.pipelining.steps.schedule_kinds import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleZB2p,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from partita.pipelining.steps.schedule_kinds import ScheduleForwardOnly as _ScheduleForwardOnly  # noqa: F401 - torch's
from partita.pipelining.training.clipping import clip_grad_norm_
from partita.pipelining.training.reference import UncutReference
from partita.pipelining.training.scaler import GradScaler
from partita.pipelining.training.step_metrics import StepMeter, StepMetrics, log_to
from partita.pipelining.training.verify_step import verify_step
from partita.runtime import TensorChunkSpec

__all__ = [
    "GradScaler",
    "LossWeights",
    "LossWrapper",
    "ModelCall",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeSequential",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
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
    "Snapshots",
    "SplitPoint",
    "StepMeter",
    "StepMetrics",
    "TensorChunkSpec",
    "TrivialLossWrapper",
    "UncutReference",
    "annotate_split_points",
    "build_stage",
    "clear_split_points",
    "clip_grad_norm_",
    "export_pretrained",
    "get_schedule_class",
    "import_pretrained",
    "keyed_graph",
    "latest_checkpoint",
    "load_checkpoint",
    "load_safetensors",
    "log_to",
    "materialise",
    "parameters_on_meta",
    "pipe_split",
    "pipeline",
    "run_programs",
    "save_checkpoint",
    "state_report",
    "verify_step",
]
