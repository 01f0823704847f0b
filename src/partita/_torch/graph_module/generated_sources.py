"""The sources of the code that ``torch.fx`` generates.

torch keeps each for good, so that tracebacks can show its lines: also those of the many graphs that are made
while a model is exported and are gone afterwards (torch 2.13: six an export).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.fx import graph_module

__all__ = ["sources_dropped"]

_OWN = "<eval_with_key>"
"""How torch's names of such files begin. Others are of files that are there."""


@contextmanager
def sources_dropped() -> Iterator[Callable[[nn.Module], None]]:
    """What is generated within it leaves no source behind, but for the modules that the function which is
    given out is called with, and theirs.

    Where another thread generates code meanwhile, its tracebacks lack these lines.
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
            if name.startswith(_OWN):
                sources.pop(name, None)
                linecache.cache.pop(name, None)
