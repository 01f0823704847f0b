"""Work that makes very many objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_garbage_collection"]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Leave Python's search for cycles off meanwhile; what nothing refers to is freed all the same.

    Where all of them stay, such as the nodes of a graph or the passes of a schedule, to look through them for
    cycles takes as long as to make them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
