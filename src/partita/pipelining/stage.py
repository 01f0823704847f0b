"""Stages, under the names of ``torch.distributed.pipelining.stage``."""

from __future__ import annotations

from typing import Any

from partita.pipelining.interface.pipe_info import PipeInfo
from partita.pipelining.stages.build import build_stage
from partita.pipelining.stages.own_modules.manual import PipelineStage
from partita.pipelining.stages.stage import Stage as _PipelineStageBase

__all__ = [
    "PipeInfo",
    "PipelineStage",
    "_PipelineStageBase",
    "_normalize_model_output_as_tuple",
    "build_stage",
]


def _normalize_model_output_as_tuple(output: Any) -> tuple[Any, ...]:
    """A module's result as a tuple: a list becomes one, a single value a tuple of one.

    >>> _normalize_model_output_as_tuple([1, 2]), _normalize_model_output_as_tuple(3)
    ((1, 2), (3,))
    """
    return tuple(output) if isinstance(output, (list, tuple)) else (output,)
