"""Which storages the value of each node may occupy.

Example values tell storages apart where they can be believed. They can't be where several traces left them,
where a tracer gave each node a value of its own (``make_fx`` with real tensors), or where the graph rebinds
or hides tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.fake.shapes import tracing_mode_of
from partita._torch.operators.schemas import always_aliased
from partita._torch.tensors.storage import storage_key
from partita.graph.state import lookup
from partita.graph.use import PLAIN, Use

__all__ = ["find_storages", "may_hold_memory", "metadata"]

_IMMUTABLE = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def metadata(node: Node) -> Any:
    """The example value that a tracer left on a node (``val`` or ``example_value``), or None."""
    meta = node.meta
    return meta["val"] if "val" in meta else meta.get("example_value")


def find_storages(
    gm: GraphModule,
    nodes: Sequence[Node],
    index: Mapping[Node, int],
    uses: Mapping[int, Use],
    *,
    distinct_inputs: bool,
    doubt_inputs: bool,
) -> tuple[list[tuple[int, ...]], dict[int, int]]:
    """May-alias sets, and the id of each tensor of the module by its storage key.

    A node that makes a fresh value is its own storage id; ids of module tensors are negative.

    Args:
        distinct_inputs: take it that no two inputs share memory. Otherwise inputs without metadata may.
        doubt_inputs: inputs with metadata may as well: a graph may be called with other arguments than those
            that it was traced with.
    """
    return _Finder(gm, nodes, index, uses).run(distinct_inputs, doubt_inputs)


class _Finder:
    """The working state of one `find_storages` call."""

    def __init__(
        self, gm: GraphModule, nodes: Sequence[Node], index: Mapping[Node, int], uses: Mapping[int, Use]
    ) -> None:
        self.gm, self.nodes, self.index, self.uses = gm, nodes, index, uses
        self.state: dict[int, int] = {}
        self.held: dict[int, tuple[int, ...]] = {}
        entangled = any(use.entangles for use in uses.values())
        self.mode = None if entangled else _common_mode(nodes, uses)
        self.entangled = entangled

    def run(self, distinct_inputs: bool, doubt_inputs: bool) -> tuple[list[tuple[int, ...]], dict[int, int]]:
        storages: list[tuple[int, ...]] = []
        by_key: dict[int, int] = {}
        unknown_input = -1
        for position, node in enumerate(self.nodes):
            if node.op == "get_attr":
                value = lookup(self.gm, node)
                own = self._ids_of(value)
                storages.append(own)
                if isinstance(value, torch.Tensor):
                    for tensor in (value, metadata(node)):
                        if isinstance(tensor, torch.Tensor):
                            by_key.setdefault(storage_key(tensor), own[0])
                continue
            use = self.uses.get(position, PLAIN)
            value = metadata(node)
            key = self._key(value)
            if use.aliases:
                shared = {identity for operand in use.aliases for identity in storages[self.index[operand]]}
                if key is not None and not use.writes and key not in by_key and self._all_known(use.aliases):
                    shared = set()  # the tracer saw a fresh storage: a copying reshape, a converting `to`
                if not shared:
                    shared = {position}
            elif (
                node.op == "placeholder"
                and not distinct_inputs
                and (value is None or (doubt_inputs and may_hold_memory(value)))
            ):
                # the caller may pass one tensor twice, or a view of another
                unknown_input = position if unknown_input < 0 else unknown_input
                shared = {unknown_input}
            else:
                shared = {position}
            if key is not None:
                shared.add(by_key.setdefault(key, min(shared)))
            storages.append(tuple(sorted(shared)))
        for use in self.uses.values():
            for tensor in (*use.state, *use.written_state):
                self._id(storage_key(tensor))
        return self._united(storages) if self.entangled else storages, self.state

    def _id(self, key: int) -> int:
        return self.state.setdefault(key, -1 - len(self.state))

    def _ids_of(self, value: Any) -> tuple[int, ...]:
        """The ids of an attribute of the module: of a tensor its storage, of anything else that can change
        its own, and those of the tensors that it holds.
        """
        if isinstance(value, torch.Tensor):
            return (self._id(storage_key(value)),)
        if isinstance(value, _IMMUTABLE):
            return ()
        if id(value) not in self.held:
            found = dict.fromkeys(self._id(storage_key(tensor)) for tensor in _tensors_of(value))
            self.held[id(value)] = (self._id(id(value)), *found)
        return self.held[id(value)]

    def _key(self, value: Any) -> int | None:
        """The storage key of an example value that can be believed."""
        if not isinstance(value, torch.Tensor) or self.entangled or value.layout is not torch.strided:
            return None
        mode = tracing_mode_of(value)
        return storage_key(value) if mode is not None and mode is self.mode else None

    def _all_known(self, operands: Sequence[Node]) -> bool:
        """Whether the storages of all these values are known from their example values."""
        return all(
            self._key(value) is not None
            for operand in operands
            for value in _leaves(metadata(operand))
            if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
        )

    def _united(self, storages: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Unite the storages of operands that may hold one another."""
        parent: dict[int, int] = {}

        def find(identity: int) -> int:
            root = identity
            while parent.get(root, root) != root:
                root = parent[root]
            while parent.get(identity, identity) != root:
                parent[identity], identity = root, parent[identity]
            return root

        for position, use in self.uses.items():
            if not use.entangles:
                continue
            united = [identity for operand in use.aliases for identity in storages[self.index[operand]]]
            united += [self.state[storage_key(tensor)] for tensor in use.written_state]
            united += storages[position]
            for identity in united:
                parent[find(identity)] = find(united[0])
        for key, identity in self.state.items():
            self.state[key] = find(identity)
        return [tuple(sorted({find(identity) for identity in shared})) for shared in storages]


def _common_mode(nodes: Sequence[Node], uses: Mapping[int, Use]) -> object | None:
    """The fake mode in which every example value of the graph was made; None where there are several, or
    where the values do not follow the storages (a view that shares no memory with its base).
    """
    found: object | None = None
    for position, node in enumerate(nodes):
        value = metadata(node)
        if not isinstance(value, torch.Tensor):
            continue
        mode = tracing_mode_of(value)
        if mode is None:
            continue
        if found is not None and mode is not found:
            return None
        found = mode
        use = uses.get(position, PLAIN)
        if not use.aliases or node.op != "call_function":
            continue
        base = node.args[0] if node.args else None
        if isinstance(base, Node) and always_aliased(node.target):
            original = metadata(base)
            if isinstance(original, torch.Tensor) and storage_key(original) != storage_key(value):
                return None
    return found


def may_hold_memory(value: Any) -> bool:
    """Whether an example value can be, or hold, something that another input shares."""
    return not isinstance(value, (*_IMMUTABLE, torch.SymInt, torch.SymFloat, torch.SymBool))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an attribute that is a container or a module."""
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
        return
    for item in _leaves(value):
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, nn.Module):
            yield from _tensors_of(item)
