"""The values that are alive between two neighbouring nodes: those that a cut there would have to transfer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from partita.graph.effects import metadata

__all__ = ["Border", "borders", "tensor_bytes"]


@dataclass(frozen=True, slots=True)
class Border:
    """The gap after the node at position ``after``.

    Attributes:
        bytes: total size of the tensors that are computed before it and used after it (attributes do not
            count: each side has its own).
        tensors: their number.
        others: the number of other values that cross: tuples, symbolic numbers, tensors of unknown size.
    """

    after: int
    bytes: int
    tensors: int
    others: int


def borders(
    nodes: Sequence[Node], index: dict[Node, int], *, ignored: Collection[str] = (), results: bool = True
) -> list[Border]:
    """Return the border after each node but the last, in time linear in nodes and edges.

    An input of the graph counts from the start: whoever runs the first part receives it.

    Args:
        ignored: names of nodes whose values do not count (sizes, which every side can compute).
        results: whether a value that the graph returns counts up to the end, and not to its last user only.
    """
    change: list[list[int]] = [[0, 0, 0] for _ in range(len(nodes) + 1)]
    for position, node in enumerate(nodes):
        if node.op in ("get_attr", "output") or node.name in ignored:
            continue
        users = (user for user in node.users if results or user.op != "output")
        last = max((index[user] for user in users), default=position)
        if last == position:
            continue
        size = tensor_bytes(metadata(node))
        kind = 2 if size is None else 1
        for at, sign in ((position, 1), (last, -1)):
            change[at][0] += sign * (size or 0)
            change[at][kind] += sign
    result, alive = [], [0, 0, 0]
    for position in range(len(nodes) - 1):
        alive = [total + step for total, step in zip(alive, change[position], strict=True)]
        result.append(Border(position, *alive))
    return result


def tensor_bytes(value: object) -> int | None:
    """Return the size in bytes of a tensor with known dimensions, else None.

    >>> tensor_bytes(torch.zeros(2, 3))
    24
    """
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return value.numel() * value.element_size()
