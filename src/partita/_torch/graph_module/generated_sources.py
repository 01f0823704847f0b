"""The sources of the code that ``torch.fx`` generates.

torch keeps each for good, so that tracebacks can show its lines, even those of the temporary graphs of an
export (torch 2.13: six each time).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.fx import graph_module

__all__ = ["sources_dropped"]

_PREFIX = "<eval_with_key>"
"""How the names of such sources begin; other names are those of files."""


@contextmanager
def sources_dropped() -> Iterator[Callable[[nn.Module], None]]:
    """Drop the sources of code that is generated in this block, but for those of the modules (and their
    submodules) that the yielded function is called with.

    Code that another thread generates meanwhile loses its sources too.
    """
    sources = graph_module._loader.eval_cache
    before, kept = set(sources), set[str]()

    def keep(module: nn.Module) -> None:
        for part in module.modules():
            code = getattr(type(part).forward, "__code__", None)
            kept.update(() if code is None else (code.co_filename,))

    try:
        yield keep
    finally:
        for name in set(sources) - before - kept:
            if name.startswith(_PREFIX):
                sources.pop(name, None)
                linecache.cache.pop(name, None)
