"""A model keeps what it was while it is traced, whatever its ``forward`` assigns.

While ``torch.export`` traces, ``self.cache = h`` stores a stand-in without data, and ``self.log.append(h)``
another one; left there they would break the model's next run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from partita._torch.containers.containers import content_of, fill, kind_of
from partita._torch.export.same_calls import alike

__all__ = ["Attributes", "rehearsal", "unchanged"]

_PASSED_BY = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.Tensor,
    torch.dtype,
    torch.device,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put every attribute of every submodule back at the end, also what is in lists, dicts, sets and deques
    among them, however deep, and in the attributes of these and of the user's other objects.

    Only what has changed is touched, and past what its class may have overridden: a ``dict`` that refuses
    ``update`` gets its items back too. The values themselves are not copied: what is written into a tensor
    stays (tracing writes nothing).
    """
    before = Attributes.of(model)
    try:
        yield
    finally:
        before.put_back()


@contextmanager
def rehearsal(model: nn.Module) -> Iterator[None]:
    """Within it the model may run on real data; afterwards buffers and random numbers are as before too.

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


class Attributes:
    """What a model held at some time, with all that it leads to; see `unchanged`.

    Attributes:
        snapshots: of each container.
    """

    def __init__(self, snapshots: Sequence[_Snapshot]) -> None:
        self.snapshots = snapshots

    @classmethod
    def of(cls, model: Any) -> Attributes:
        """As they are now; of a list, those of all that is in it."""
        return cls(_snapshots(model))

    def put_back(self) -> Attributes:
        """Put it back, where it has changed; what was there instead."""
        replaced = [snapshot.exchange() for snapshot in self.snapshots]
        return Attributes([snapshot for snapshot in replaced if snapshot is not None])

    def same_as(self, other: Attributes) -> bool:
        """Whether both are sure to be the same."""
        here, there = (
            {id(snapshot.container): snapshot.content for snapshot in side.snapshots}
            for side in (self, other)
        )
        return here.keys() == there.keys() and all(_all_same(here[key], there[key]) for key in here)


def _all_same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    pairs = zip(left, right, strict=False)
    return len(left) == len(right) and all(one is other or alike(one, other) for one, other in pairs)


@dataclass(frozen=True)
class _Snapshot:
    """What a container held, flat."""

    container: Any
    content: list[Any]

    def exchange(self) -> _Snapshot | None:
        """Put it back; what was there instead, if it was anything else."""
        now = content_of(self.container)
        same = len(now) == len(self.content)
        if same and all(new is old for new, old in zip(now, self.content, strict=True)):
            return None
        fill(self.container, self.content)
        return _Snapshot(self.container, now)


def _snapshots(model: Any) -> list[_Snapshot]:
    """Of everything that can be reached from ``model`` and changed in place."""
    snapshots: list[_Snapshot] = []
    seen: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _PASSED_BY) or id(value) in seen:
            continue
        seen.add(id(value))
        if kind_of(value) is not None:
            snapshots.append(_Snapshot(value, content_of(value)))
            waiting += snapshots[-1].content
        if isinstance(value, (tuple, frozenset)):
            waiting += value
        elif _is_users(value):
            waiting.append(vars(value))
    return snapshots


def _is_users(value: Any) -> bool:
    """Whether it has attributes that a model's ``forward`` may change. Those of Python's and torch's own
    objects (a logger, a process group) lead to what the whole program shares.
    """
    if isinstance(value, nn.Module):
        return True
    home = type(value).__module__.partition(".")[0]
    return home not in sys.stdlib_module_names and home != "torch" and hasattr(value, "__dict__")
