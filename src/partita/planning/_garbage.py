"""Work that makes very many objects, none of which refers to itself by any way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_garbage_collection"]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Leave Python's search for cycles off meanwhile; what nothing refers to is freed all the same.

    Millions of passes and spans are made: to look through them for cycles takes as long as to make them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
