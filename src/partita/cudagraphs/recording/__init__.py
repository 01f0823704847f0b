"""Recording a region and replaying it: on a GPU, or strictly on the CPU."""

from __future__ import annotations

from partita.cudagraphs.recording.cpu import ReplayRecorder
from partita.cudagraphs.recording.cuda import CudaRecorder
from partita.cudagraphs.recording.pool import MemoryPool, MemoryPools
from partita.cudagraphs.recording.recorder import GraphRecorder, Recording

__all__ = ["CudaRecorder", "GraphRecorder", "MemoryPool", "MemoryPools", "Recording", "ReplayRecorder"]
