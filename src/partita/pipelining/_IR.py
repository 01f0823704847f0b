# ruff: noqa: N999 - torch's name
"""Models and pipes under the names of ``torch.distributed.pipelining._IR``, for programs that change the
import.
"""

from __future__ import annotations

from partita.pipelining.cutting.annotations import annotate_split_points
from partita.pipelining.cutting.cuts import SplitPoint, pipe_split
from partita.pipelining.cutting.frontend import pipeline
from partita.pipelining.cutting.multi_use import MultiUseParameterConfig
from partita.pipelining.cutting.pipe import Pipe
from partita.pipelining.cutting.sequential import PipeSequential
from partita.pipelining.loss import LossWrapper, TrivialLossWrapper

__all__ = [
    "LossWrapper",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeSequential",
    "SplitPoint",
    "TrivialLossWrapper",
    "annotate_split_points",
    "pipe_split",
    "pipeline",
]
