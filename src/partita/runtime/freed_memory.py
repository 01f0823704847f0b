"""Memory that a process has freed, kept for what it needs next.

A step takes and frees what its microbatches keep, again and again. glibc gives large blocks back to the
system at once, which hands out memory page by page when they are needed next. It learns: once a large block
was freed, blocks up to that size come from memory that stays, of which it gives back what lies free at the
end when that is twice as much (M_MMAP_THRESHOLD, mallopt(3)). But it takes several steps to see the sizes of
a step, and begins anew with each larger one. So it is shown the largest that it learns from.
"""

from __future__ import annotations

import torch

__all__ = ["keep_freed_memory"]

_LARGEST = 2**25 - 2**16
"""Bytes; glibc learns from blocks of at most 32 MiB, its own words about them included."""


def keep_freed_memory() -> None:
    """Let this process keep up to 64 MiB of what it frees. Takes no memory itself, since the block is never
    written to, and changes nothing where the user has set the allocator (``MALLOC_TRIM_THRESHOLD_``,
    ``MALLOC_MMAP_THRESHOLD_``), or has another one than glibc's.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
