"""Whether torch's profiler listens, and ranges with names for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

__all__ = ["is_profiling", "profiler_range"]

_NOTHING: AbstractContextManager[None] = nullcontext()


def is_profiling() -> bool:
    """Whether ``torch.profiler.profile`` or ``torch.autograd.profiler.emit_nvtx`` is on in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def profiler_range(name: str, *, wanted: bool = True) -> AbstractContextManager[object]:
    """A range that the profiler shows (``emit_nvtx``: as an NVTX range); nothing where it is not wanted."""
    return record_function(name) if wanted else _NOTHING
