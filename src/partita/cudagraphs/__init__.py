"""CUDA graphs piece by piece: capture all that can be captured, run the rest as it is, and say why.

The classes of what is returned are in the packages below: plans in `regions`, recordings in `recording`,
counts of them in `replaying`, padded graphs in `padding`.
"""

from __future__ import annotations

from partita.cudagraphs.backend import CudaGraphsBackend, cudagraphs
from partita.cudagraphs.explain import explain
from partita.cudagraphs.facts.written_inputs import find_input_mutations
from partita.cudagraphs.recording import CudaRecorder, GraphRecorder, ReplayRecorder
from partita.cudagraphs.regions import CaptureRules, SavingModel, find_regions, partition_cudagraphs
from partita.cudagraphs.replaying import CudaGraphModule
from partita.cudagraphs.runner import CudaGraphsRunner

__all__ = [
    "CaptureRules",
    "CudaGraphModule",
    "CudaGraphsBackend",
    "CudaGraphsRunner",
    "CudaRecorder",
    "GraphRecorder",
    "ReplayRecorder",
    "SavingModel",
    "cudagraphs",
    "explain",
    "find_input_mutations",
    "find_regions",
    "partition_cudagraphs",
]
