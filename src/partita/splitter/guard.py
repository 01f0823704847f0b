"""A check at run time of what could not be known when a graph was cut: that inputs share no memory.

An input without metadata may be given the same tensor as another, or a view of it. Where the pieces can be
ordered as if that may be so, they are. Only where they can't, a check is put at the head of the stitched
graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import has_side_effect

from partita._torch.storage import storage_key
from partita.errors import ExecutionError

__all__ = ["DistinctInputs", "require_distinct"]


@dataclass(frozen=True, slots=True)
class DistinctInputs:
    """Positions of the inputs that the graph writes, and of all others; a written one may share memory with
    no other input.
    """

    written: tuple[int, ...]
    others: tuple[int, ...]


def require_distinct(names: Sequence[str], written: int, values: Sequence[Any]) -> None:
    """Raise where one of the first ``written`` values shares its memory with any other value.

    Args:
        names: of the inputs, for the message.
        values: the inputs; containers are looked into, what is no tensor is passed over.

    Raises:
        ExecutionError: the message names both inputs.
    """
    owners: dict[int, int] = {}
    for number, value in enumerate(values):
        keys = {storage_key(tensor) for tensor in _tensors(value)}
        for key in keys:
            first = owners.setdefault(key, number)
            if first != number and first < written:
                raise ExecutionError(
                    f"inputs {names[first]!r} and {names[number]!r} share memory, and the graph writes "
                    f"{names[first]!r}; it was cut so that "
                    "nodes run in another order, which is right only for inputs that share none: pass a "
                    "clone() of one of them, or "
                    "put the nodes that use both into one piece"
                )


has_side_effect(require_distinct)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
