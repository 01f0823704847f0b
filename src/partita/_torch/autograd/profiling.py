"""Whether torch's profiler listens, and ranges with names for it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.profiler import record_function

__all__ = ["is_profiling", "is_read_by_profiler", "profiler_range"]

_NOTHING: AbstractContextManager[None] = nullcontext()
_MODULE_CALL = nn.Module.__call__.__code__


def is_profiling() -> bool:
    """Whether ``torch.profiler.profile`` or ``torch.autograd.profiler.emit_nvtx`` is on in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def is_read_by_profiler() -> bool:
    """Whether a function mode that calls this has caught a gradient that torch's profiler reads.

    With ``with_stack`` it reads those of a module's parameters in the moment in which the module is called,
    the first time that it sees it. The code of that call reads none.
    """
    return sys._getframe(2).f_code is _MODULE_CALL


def profiler_range(name: str, *, wanted: bool = True) -> AbstractContextManager[object]:
    """A range that the profiler shows (``emit_nvtx``: as an NVTX range); nothing where it is not wanted."""
    return record_function(name) if wanted else _NOTHING
