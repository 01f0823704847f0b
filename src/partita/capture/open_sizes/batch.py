"""Finding the inputs whose first dimension is the batch, and examples for an export with an open batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita._torch.containers.pytree import flatten, unflatten
from partita._torch.export.open_sizes import open_batch

__all__ = ["Example", "examples", "in_batch", "traceable_arguments"]


@dataclass(frozen=True, eq=False)
class Example:
    """Arguments to export a model with.

    Attributes:
        dynamic_shapes: as ``torch.export`` takes them; None: all sizes are fixed.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any = None

    @property
    def flat(self) -> list[Any]:
        """The arguments as a flat list, one for each placeholder."""
        return flatten((self.args, self.kwargs))[0]


def traceable_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the same arguments with a copy for each tensor that is passed a second time, or was made in
    inference mode.

    A tracer takes one tensor for one input, and the graph would read the one where the model reads the other;
    and it takes what no backward pass may save for what is handed in later, too.

    >>> ids = torch.zeros(2)
    >>> first, second = traceable_arguments((ids, ids), {})[0]
    >>> first is second
    False
    """
    flat, structure = flatten((args, dict(kwargs)))
    seen: set[int] = set()
    for position, value in enumerate(flat):
        if isinstance(value, Tensor):
            if id(value) in seen or value.is_inference():
                flat[position] = value.detach().clone().requires_grad_(value.requires_grad)
            seen.add(id(value))
    more, named = unflatten(flat, structure)
    return more, named


def in_batch(flat: Sequence[Any]) -> list[int]:
    """Return the positions of the tensors whose first dimension is the batch.

    The size of the batch is the most frequent first dimension other than 1 (which is broadcast); of those
    that are equally frequent, the first.

    >>> in_batch([torch.zeros(2, 8), 3, torch.zeros(1, 8), torch.zeros(2)])
    [0, 3]
    """
    first = {
        position: int(value.shape[0])
        for position, value in enumerate(flat)
        if isinstance(value, Tensor) and value.dim()
    }
    sizes = [size for size in first.values() if size != 1] or list(first.values())
    if not sizes:
        return []
    batch = max(dict.fromkeys(sizes), key=sizes.count)
    return [position for position, size in first.items() if size == batch]


def examples(args: tuple[Any, ...], kwargs: Mapping[str, Any], closed: frozenset[int]) -> Iterator[Example]:
    """Return examples to export with an open batch, best first.

    A batch of one is doubled in the first: with one, torch's own rules would fix some sizes to 1.

    Args:
        closed: positions of the tensors whose batch stays fixed.
    """
    flat, structure = flatten((args, dict(kwargs)))
    chosen = [position for position in in_batch(flat) if position not in closed]
    if not chosen:
        return
    if flat[chosen[0]].shape[0] == 1:
        doubled = [_doubled(value) if position in chosen else value for position, value in enumerate(flat)]
        more, named = unflatten(doubled, structure)
        yield Example(more, named, open_batch([doubled[position] for position in chosen]))
    yield Example(args, dict(kwargs), open_batch([flat[position] for position in chosen]))


def _doubled(value: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat((value, value)).requires_grad_(value.requires_grad)
