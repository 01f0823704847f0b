"""Restoring what a model's ``forward`` assigns while it is traced.

While ``torch.export`` traces, ``self.cache = h`` and ``self.log.append(h)`` store tensors without data, which
would break the model's next run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.containers.containers import content_of, fill, kind_of
from partita._torch.export.alike import alike
from partita._torch.tensors.storage import has_memory, storage_key
from partita.verification.comparing.compare import compare_tensors

__all__ = ["Attributes", "rehearsal", "unchanged"]

_NOT_SEARCHED = (
    type(None), bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, type,
    FunctionType, BuiltinFunctionType, MethodType, ModuleType,
)  # fmt: skip


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore all attributes of all submodules at the end of the block.

    That includes the items of lists, dicts, sets and deques at any depth, the attributes of the user's other
    objects, and what is written into tensors among them: a counter that is neither parameter nor buffer is a
    constant for a tracer, which counts on for real. Only what has changed is written, without methods that a
    class may have overridden: a ``dict`` that refuses ``update`` is restored too.
    """
    before = Attributes.of(model)
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    try:
        with _same_elements(tensor for tensor in before.tensors() if id(tensor) not in registered):
            yield
    finally:
        before.put_back()


@contextmanager
def rehearsal(model: nn.Module, *, parameters: bool = False) -> Iterator[None]:
    """Restore the same, buffers and the random state: the model may run on real data within the block.

    Args:
        parameters: restore what is written into them too, for which they are copied.
    """
    written = [*model.buffers(), *(model.parameters() if parameters else ())]
    with unchanged(model), torch.random.fork_rng(), _same_elements(written), _same_data(model):
        yield


@contextmanager
def _same_data(model: nn.Module) -> Iterator[None]:
    """Restore the ``data`` of parameters and buffers that have got another."""
    before = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for tensor, data in before:
            if storage_key(tensor) != storage_key(data):
                tensor.data = data


@contextmanager
def _same_elements(tensors: Iterable[Tensor]) -> Iterator[None]:
    before = [(tensor, tensor.detach().clone()) for tensor in tensors if has_memory(tensor)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                if compare_tensors(tensor.detach(), value, "") is not None:
                    tensor.copy_(value)


class Attributes:
    """The attributes of a model at some time, and all that can be reached from them; see `unchanged`.

    Attributes:
        snapshots: one for each container.
    """

    def __init__(self, snapshots: Sequence[_Snapshot]) -> None:
        self.snapshots = snapshots

    @classmethod
    def of(cls, model: Any) -> Attributes:
        """Return the present attributes of a model, or of everything in a list."""
        return cls(_snapshots(model))

    def tensors(self) -> list[Tensor]:
        """Return the tensors among them, each once."""
        content = (value for snapshot in self.snapshots for value in snapshot.content)
        return list({id(value): value for value in content if isinstance(value, Tensor)}.values())

    def put_back(self) -> Attributes:
        """Restore them; return what had changed, as it was before this call."""
        replaced = [snapshot.exchange() for snapshot in self.snapshots]
        return Attributes([snapshot for snapshot in replaced if snapshot is not None])

    def same_as(self, other: Attributes) -> bool:
        """Return whether both are certainly equal."""
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
    """The content of a container at some time, as a flat list."""

    container: Any
    content: list[Any]

    def exchange(self) -> _Snapshot | None:
        """Restore it; return the content before this call, if that was different."""
        now = content_of(self.container)
        same = len(now) == len(self.content)
        if same and all(new is old for new, old in zip(now, self.content, strict=True)):
            return None
        fill(self.container, self.content)
        return _Snapshot(self.container, now)


def _snapshots(model: Any) -> list[_Snapshot]:
    """Snapshots of everything that can be reached from ``model`` and changed in place."""
    snapshots: list[_Snapshot] = []
    seen: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _NOT_SEARCHED) or id(value) in seen:
            continue
        seen.add(id(value))
        if kind_of(value) is not None:
            snapshots.append(_Snapshot(value, content_of(value)))
            waiting += snapshots[-1].content
        if isinstance(value, (tuple, frozenset)):
            waiting += iter(value)  # e3nn's tuples have no length
        elif _is_users(value):
            waiting.append(vars(value))
    return snapshots


def _is_users(value: Any) -> bool:
    """Whether an object has attributes that a model's ``forward`` may change.

    Python's and torch's own objects (a logger, a process group) lead to what the whole program shares.
    """
    if isinstance(value, nn.Module):
        return True
    home = type(value).__module__.partition(".")[0]
    return home not in sys.stdlib_module_names and home != "torch" and hasattr(value, "__dict__")
