"""CUDA graphs piece by piece: capture all that can be captured, run the rest as it is, and say why."""

from __future__ import annotations

from partita.cudagraphs.backend import CapturedGraph, CudaGraphsBackend, cudagraphs
from partita.cudagraphs.capturable import CaptureRules, Refusal
from partita.cudagraphs.cuda import CudaRecorder
from partita.cudagraphs.entry import CacheInfo
from partita.cudagraphs.explain import ExplainedGraph, Explanation, explain
from partita.cudagraphs.memory import StableMemory
from partita.cudagraphs.module import CudaGraphModule
from partita.cudagraphs.mutations import find_input_mutations
from partita.cudagraphs.options import BackendOptions
from partita.cudagraphs.padding import PaddedGraph
from partita.cudagraphs.partition import partition_cudagraphs
from partita.cudagraphs.pool import MemoryPool
from partita.cudagraphs.recorder import GraphRecorder, Recording
from partita.cudagraphs.regions import Region, RegionPlan, find_regions
from partita.cudagraphs.replay import ReplayRecorder
from partita.cudagraphs.runner import CudaGraphsRunner
from partita.cudagraphs.saving import SavingModel

__all__ = [
    "BackendOptions",
    "CacheInfo",
    "CaptureRules",
    "CapturedGraph",
    "CudaGraphModule",
    "CudaGraphsBackend",
    "CudaGraphsRunner",
    "CudaRecorder",
    "ExplainedGraph",
    "Explanation",
    "GraphRecorder",
    "MemoryPool",
    "PaddedGraph",
    "Recording",
    "Refusal",
    "Region",
    "RegionPlan",
    "ReplayRecorder",
    "SavingModel",
    "StableMemory",
    "cudagraphs",
    "explain",
    "find_input_mutations",
    "find_regions",
    "partition_cudagraphs",
]
