"""Which replicated module a parameter belongs to, and which one a thread has used last."""

from __future__ import annotations

import threading
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Owners"]


class _Closable(Protocol):
    closed: bool


Owner = TypeVar("Owner", bound=_Closable)


class Owners(Generic[Owner]):
    """Keeps neither parameters nor their owners alive."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._owners: Any = WeakIdKeyDictionary()

    def claim(self, parameter: torch.Tensor, owner: Owner, index: int) -> None:
        """Note that ``parameter`` is number ``index`` of ``owner``."""
        self._owners[parameter] = (ref(owner), index)

    def release(self, parameter: torch.Tensor) -> None:
        """Forget the owner of ``parameter``."""
        self._owners.pop(parameter, None)

    def is_orphan(self, parameter: torch.Tensor) -> bool:
        """Whether the owner of ``parameter`` went without releasing it."""
        reference, _ = self._owners.get(parameter, (None, 0))
        return reference is not None and reference() is None

    def owner_of(self, value: Any) -> tuple[Owner, int] | None:
        """Return the owner that a parameter belongs to, and its index there; None for all else."""
        if not isinstance(value, torch.Tensor):
            return None
        reference, index = self._owners.get(value, (None, 0))
        owner = None if reference is None else reference()
        return None if owner is None else (owner, index)

    def note_use(self, owner: Owner) -> None:
        """Note that a module has been replicated, or that its forward pass begins."""
        self._thread.last = ref(owner)

    def last_used(self) -> Owner | None:
        """Return what this thread has made or used last, where it is not closed."""
        reference = getattr(self._thread, "last", None)
        owner: Owner | None = None if reference is None else reference()
        return None if owner is None or owner.closed else owner
