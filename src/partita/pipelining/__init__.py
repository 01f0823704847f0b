"""Pipeline parallelism: stages of one model on several ranks.

Here is what most scripts type: torch's names, the further schedules, and what stands around a step. The rest
has modules of its own: ``checkpoints`` (also snapshots and exports), ``training`` (also metrics and
`verify_step`), ``stages`` (also `materialise` and `to_torch_stage`), ``decoding``, and ``schedules`` (their
bases and `CustomSchedule`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from partita.pipelining.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partita.pipelining.frontends.cuts import annotate_split_points
from partita.pipelining.frontends.cuts.cuts import SplitPoint, pipe_split
from partita.pipelining.frontends.cuts.sequential import PipeSequential
from partita.pipelining.frontends.graph.multi_use import MultiUseParameterConfig
from partita.pipelining.frontends.pipe import Pipe
from partita.pipelining.frontends.pipeline import keyed_graph, measure_units, pipeline
from partita.pipelining.interface.loss import LossWrapper, TrivialLossWrapper
from partita.pipelining.stages.build import build_stage
from partita.pipelining.stages.own_modules.manual import PipelineStage
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
from partita.runtime import TensorChunkSpec

__all__ = [
    "GradScaler",
    "LossWrapper",
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
    "SplitPoint",
    "TensorChunkSpec",
    "TrivialLossWrapper",
    "UncutReference",
    "annotate_split_points",
    "build_stage",
    "clip_grad_norm_",
    "get_schedule_class",
    "keyed_graph",
    "load_checkpoint",
    "measure_units",
    "pipe_split",
    "pipeline",
    "save_checkpoint",
]

_ELSEWHERE = {
    "checkpoints": (
        *("Snapshots", "export_pretrained", "import_pretrained", "latest_checkpoint"),
        *("load_safetensors", "state_report"),
    ),
    "decoding": ("ModelCall", "run_programs"),
    "frontends.cuts": ("clear_split_points",),
    "stages": ("materialise", "parameters_on_meta"),
    "training": ("LossWeights", "StepMeter", "StepMetrics", "log_to", "verify_step"),
}
"""Names that scripts may still import from here, as they could before the modules had them."""


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return import_module(f"{__name__}.{name}")
    for module, names in _ELSEWHERE.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
