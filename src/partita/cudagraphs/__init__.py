"""CUDA graphs piece by piece: capture all that can be captured, run the rest as it is, and say why."""

from __future__ import annotations

from partita.cudagraphs.backend import CapturedGraph, CudaGraphsBackend, cudagraphs
from partita.cudagraphs.explain import ExplainedGraph, Explanation, explain
from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.facts.written_inputs import find_input_mutations
from partita.cudagraphs.options import BackendOptions
from partita.cudagraphs.padding.padding import PaddedGraph
from partita.cudagraphs.recording.cpu import ReplayRecorder
from partita.cudagraphs.recording.cuda import CudaRecorder
from partita.cudagraphs.recording.pool import MemoryPool
from partita.cudagraphs.recording.recorder import GraphRecorder, Recording
from partita.cudagraphs.regions.capturable import CaptureRules, Refusal
from partita.cudagraphs.regions.grouping import Region, RegionPlan, find_regions
from partita.cudagraphs.regions.launch_savings import SavingModel
from partita.cudagraphs.regions.partition import partition_cudagraphs
from partita.cudagraphs.replaying.entry import CacheInfo
from partita.cudagraphs.replaying.module import CudaGraphModule
from partita.cudagraphs.runner import CudaGraphsRunner

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
