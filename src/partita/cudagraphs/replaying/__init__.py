"""A region as a module that is recorded once for each kind of call."""

from __future__ import annotations

from partita.cudagraphs.replaying.entry import CacheInfo
from partita.cudagraphs.replaying.module import CudaGraphModule

__all__ = ["CacheInfo", "CudaGraphModule"]
