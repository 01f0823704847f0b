"""Which replicated module a parameter belongs to, and which one a thread has used last."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from partita.ddp.replicate import Replication

__all__ = ["claim", "last_used", "note_use", "owner_of", "release"]

_THREAD = threading.local()
_OWNERS: Any = WeakIdKeyDictionary()


def claim(parameter: torch.Tensor, replication: Replication, index: int) -> None:
    """Note that ``parameter`` is number ``index`` of ``replication``."""
    _OWNERS[parameter] = (ref(replication), index)


def release(parameter: torch.Tensor) -> None:
    """Forget ``parameter``."""
    _OWNERS.pop(parameter, None)


def owner_of(value: Any) -> tuple[Replication, int] | None:
    """The replication that a parameter belongs to, and its index there."""
    if not isinstance(value, torch.Tensor):
        return None
    found = _OWNERS.get(value)
    if found is None:
        return None
    replication = found[0]()
    return None if replication is None else (replication, found[1])


def note_use(replication: Replication) -> None:
    """A module has been replicated, or its forward pass begins."""
    _THREAD.last = ref(replication)


def last_used() -> Replication | None:
    """The replication that this thread has made or used last, where it is not closed."""
    found = getattr(_THREAD, "last", None)
    replication: Replication | None = None if found is None else found()
    return None if replication is None or replication.closed else replication
