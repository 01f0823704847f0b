"""Stages under the names of ``torch.distributed.pipelining.stage``, for programs that change the import."""

from __future__ import annotations

from partita.pipelining.stages.build import build_stage
from partita.pipelining.stages.manual import PipelineStage
from partita.pipelining.stages.stage import Stage as _PipelineStageBase

__all__ = ["PipelineStage", "_PipelineStageBase", "build_stage"]
