"""Memory that a process has freed, kept for what it needs next.

A step takes and frees what its microbatches keep, again and again. glibc gives large blocks back to the
system at once, and what lies free at the end of its memory; the system hands it out again page by page. So as
long as steps are made, the process keeps what they have freed (M_TRIM_THRESHOLD and M_MMAP_THRESHOLD,
mallopt(3)), as it does on devices: no more than it has used at once.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["freed_memory_kept", "give_back_freed_memory", "keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""How mallopt calls them."""
_UNLIMITED = -1
_LARGEST_BLOCK = 2**25
"""Bytes of the largest block that glibc takes from memory that stays; larger ones go back when freed."""
_KEPT_AFTERWARDS = 2**26
"""Bytes at the end of its memory that a process keeps when no steps are made any more; glibc comes to as much
by itself where blocks are as large.
"""

_users: set[int] = set()
"""Identities of those that keep it, each until it is gone: a schedule of the user's need not be hashable."""


def keep_freed_memory(user: object) -> None:
    """Let this process keep what it frees, until the last one that wants it gives it back, or is gone.

    Nothing changes where the environment sets the allocator (``MALLOC_TRIM_THRESHOLD_`` and its like, or
    ``GLIBC_TUNABLES``), or it is another one than glibc's.
    """
    weakref.finalize(user, _give_back, id(user)).atexit = False
    _keep(id(user))


def give_back_freed_memory(user: object) -> None:
    """Give free memory back to the system, unless another one keeps it."""
    _give_back(id(user))


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Let this process keep what it frees in this block."""
    block = object()
    _keep(id(block))
    try:
        yield
    finally:
        _give_back(id(block))


def _keep(user: int) -> None:
    _users.add(user)
    if (libc := _glibc()) is not None:
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
        libc.mallopt(_TRIM_THRESHOLD, _UNLIMITED)


def _give_back(user: int) -> None:
    if user not in _users:
        return
    _users.discard(user)
    if not _users and (libc := _glibc()) is not None:
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_AFTERWARDS)
        libc.malloc_trim(_KEPT_AFTERWARDS)


def _glibc() -> ctypes.CDLL | None:
    """What sets the allocator, unless the user has."""
    environment = os.environ
    if any(name.startswith("MALLOC_") and name.endswith("_") for name in environment):
        return None
    if "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return None
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
