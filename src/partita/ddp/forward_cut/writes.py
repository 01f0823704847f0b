"""Which pieces of a forward graph stay together, because one writes to memory that another may have saved for
its backward pass.

Autograd notices such a write by a version that a tensor shares with its views and with what is detached from
it. Values that leave a compiled piece share memory, and no longer the version::

    y = a(x); v = y.detach()    piece 0: returns y and v
    z = b(y)                    piece 1: saves y
    v.add_(1)                   piece 2: y has changed, and its version has not

One value that is saved and written under the same name is the same tensor, with one version, wherever the
graph is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.tensors.storage import storage_key
from partita.graph.effect_rules.node_effect import PURE
from partita.graph.effects import Effects, analyse, metadata

__all__ = ["joined_over_writes"]


def joined_over_writes(gm: GraphModule, piece_of: Mapping[Node, int]) -> dict[Node, int]:
    """Return the pieces of all nodes, fewer where autograd would miss a write.

    Args:
        piece_of: where each node would be, in forward order.
    """
    effects = analyse(gm)
    first_of: dict[int, int] = {}
    for low, high in _missed_writes(effects, piece_of):
        for number in range(low + 1, high + 1):
            first_of[number] = min(low, first_of.get(number, low))
    return {node: _root(first_of, number) for node, number in piece_of.items()}


def _root(first_of: Mapping[int, int], number: int) -> int:
    while number in first_of:
        number = first_of[number]
    return number


def _missed_writes(effects: Effects, piece_of: Mapping[Node, int]) -> Iterator[tuple[int, int]]:
    """The first and the last piece of those that must be one, for each write."""
    if not effects.storages:
        return
    saved: dict[int, dict[Any, int]] = {}  # by storage: the values that autograd may hold, with their pieces
    for position, node in enumerate(effects.nodes):
        if node not in piece_of:
            continue
        here = piece_of[node]
        for storage, value in _written(effects, position):
            earlier = next((piece for other, piece in saved.get(storage, {}).items() if other != value), here)
            if earlier != here:
                yield min(earlier, here), max(earlier, here)
        if not _is_recorded(node):
            continue
        for touched in (*node.all_input_nodes, node):
            for storage in effects.storages[effects.index[touched]]:
                saved.setdefault(storage, {}).setdefault(_identity(touched), here)


def _written(effects: Effects, position: int) -> Iterator[tuple[int, Any]]:
    """Storages that a node writes, each with the value through which it does."""
    effect = effects.by_position.get(position, PURE)
    for operand in effect.writes:
        for storage in effects.storages[effects.index[operand]]:
            yield storage, _identity(operand)
    for tensor in effect.written_state:
        yield effects.state_storages[storage_key(tensor)], None


def _is_recorded(node: Node) -> bool:
    """Whether autograd may save operands or results of a node."""
    value = metadata(node)
    if isinstance(value, (list, tuple)):
        return any(not isinstance(item, torch.Tensor) or item.requires_grad for item in value)
    return not isinstance(value, torch.Tensor) or value.requires_grad


def _identity(node: Node) -> Any:
    """Equal for nodes whose values are one tensor: an operator that writes returns what it has written to."""
    value = metadata(node)
    return id(value) if isinstance(value, torch.Tensor) else node
