"""Checks at run time of what is not known when a graph is cut.

An input without metadata may be given the same tensor as another one, a view of it, or a tensor of the model.
The pieces are ordered so that this is right too. Only where they can't be, a check is put at the head of the
stitched graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.node import has_side_effect

from partita._torch.tensors.storage import storage_key
from partita.errors import ExecutionError

__all__ = ["DistinctInputs", "Guards", "require_distinct", "require_foreign"]


@dataclass(frozen=True, slots=True)
class DistinctInputs:
    """A condition: no input that the graph writes shares memory with another input.

    Attributes:
        written: positions of the inputs that the graph writes.
        others: positions of all other inputs.
        places: for each of them, written ones first, the id of its storage when the graph was traced; inputs
            with the same id may share memory.
    """

    written: tuple[int, ...]
    others: tuple[int, ...]
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Guards:
    """Conditions under which the order of the pieces is right.

    Attributes:
        distinct: which inputs must share no memory; None where any may.
        foreign: positions of the inputs that must not be tensors of the model.
    """

    distinct: DistinctInputs | None = None
    foreign: tuple[int, ...] = ()


def require_distinct(
    names: Sequence[str], written: int, values: Sequence[Any], places: Sequence[int] = ()
) -> None:
    """Raise where one of the first ``written`` values shares its memory with any other value.

    Args:
        names: of the inputs, for the message.
        values: the inputs; containers are searched for tensors, other values are ignored.
        places: values with equal ids may share memory.

    Raises:
        ExecutionError: the message names both inputs.
    """
    owners: dict[int, int] = {}
    for number, value in enumerate(values):
        keys = {storage_key(tensor) for tensor in _tensors(value)}
        for key in keys:
            first = owners.setdefault(key, number)
            if first != number and first < written and not (places and places[first] == places[number]):
                raise ExecutionError(
                    f"inputs {names[first]!r} and {names[number]!r} share memory, and the graph writes "
                    f"{names[first]!r}; it was cut so that nodes run in another order, which is right only "
                    "for inputs that share none: pass a clone() of one of them, or put the nodes that use "
                    "both into one piece"
                )


def require_foreign(names: Sequence[str], values: Sequence[Any], owned: Iterable[Any]) -> None:
    """Raise where one of ``values`` shares its memory with a tensor of the model.

    Args:
        names: of the inputs, for the message.
        owned: modules and tensors of the model.

    Raises:
        ExecutionError: the message names the input and the model's tensor.
    """
    own: dict[int, str] = {}
    for item in owned:
        if isinstance(item, nn.Module):
            tensors = (*item.named_parameters(), *item.named_buffers())
            own |= {storage_key(tensor): f"{name!r} of the model" for name, tensor in tensors}
        elif isinstance(item, torch.Tensor):
            own[storage_key(item)] = "a tensor of the model"
    for name, value in zip(names, values, strict=True):
        for tensor in _tensors(value):
            if storage_key(tensor) in own:
                raise ExecutionError(
                    f"input {name!r} shares memory with {own[storage_key(tensor)]}, and the graph writes one "
                    "of the two; it was cut so that nodes run in another order, which is right only for "
                    "inputs of their own: pass a clone(), or put the nodes that use both into one piece"
                )


for _check in (require_distinct, require_foreign):
    has_side_effect(_check)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
