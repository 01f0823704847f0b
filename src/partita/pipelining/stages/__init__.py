"""What one rank runs of a model, one microbatch at a time."""

from __future__ import annotations

from partita.pipelining.interface.pipe_info import PipeInfo
from partita.pipelining.stages.build import build_stage
from partita.pipelining.stages.interop import to_torch_stage
from partita.pipelining.stages.own_modules.manual import PipelineStage
from partita.pipelining.stages.placing.materialise import materialise, parameters_on_meta
from partita.pipelining.stages.stage import Stage

__all__ = [
    "PipeInfo",
    "PipelineStage",
    "Stage",
    "build_stage",
    "materialise",
    "parameters_on_meta",
    "to_torch_stage",
]
