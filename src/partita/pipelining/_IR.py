# ruff: noqa: N999 - torch's name
"""Models and pipes, under the names of ``torch.distributed.pipelining._IR``."""

from __future__ import annotations

from partita.pipelining.frontends.cuts.annotations import annotate_split_points
from partita.pipelining.frontends.cuts.cuts import SplitPoint, pipe_split
from partita.pipelining.frontends.cuts.sequential import PipeSequential
from partita.pipelining.frontends.graph.multi_use import MultiUseParameterConfig
from partita.pipelining.frontends.pipe import Pipe
from partita.pipelining.frontends.pipeline import pipeline
from partita.pipelining.interface.loss import LossWrapper, TrivialLossWrapper

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
