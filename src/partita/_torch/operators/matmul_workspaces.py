"""The memory that cuBLAS works in, which torch keeps for each stream from one matrix product to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["matmul_workspaces_of_their_own"]


@contextmanager
def matmul_workspaces_of_their_own() -> Iterator[None]:
    """What is captured in here finds no workspace, so that it gets one in the memory of its capture.

    One that was there before lies elsewhere, and the recording would only know its address: whoever lets go
    of all workspaces (as Inductor's CUDA graphs do) gives it to others, and each replay would write there.
    Behind it they are let go of too, or the next product of this stream would use that of the recording.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)  # torch for the CPU has none
    clear()
    try:
        yield
    finally:
        clear()
