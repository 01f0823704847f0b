"""A model keeps what it was while it is traced, whatever its ``forward`` assigns.

While ``torch.export`` traces, ``self.cache = h`` stores a stand-in without data, and ``self.log.append(h)``
another one; left there they would break the model's next run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["unchanged"]


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


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else type(container)(container)
