"""A model keeps what it was while it is traced, whatever its ``forward`` assigns.

While ``torch.export`` traces, ``self.cache = h`` stores a stand-in without data, and ``self.log.append(h)``
another one; left there they would break the model's next run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["rehearsal", "unchanged"]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put every attribute of every submodule back at the end, also what is in lists, dicts and sets among
    them.

    The values themselves are not copied: what is written into a tensor stays (tracing writes nothing).
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    contents = [
        (value, _copy(value))
        for held in attributes
        for value in held.values()
        if type(value) in (list, set) or isinstance(value, dict)
    ]
    try:
        yield
    finally:
        for module, held in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(held)
        for container, before in contents:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)


@contextmanager
def rehearsal(model: nn.Module) -> Iterator[None]:
    """Within it the model may run on real data; buffers and torch's random state are as before afterwards too.

    Nothing is copied but buffers; parameters are taken for what no ``forward`` writes to.
    """
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with unchanged(model), torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in before:
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else type(container)(container)
