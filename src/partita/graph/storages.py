"""Which storages the value of each node may occupy: a may-alias analysis.

Terms:
    storage id: the position of the node whose value has a fresh storage; for a tensor of the module a
        negative number. A value that may alias others has several ids.
    storage key: identifies the storage of a tensor that exists, such as an example value.
    example value: what a tracer left on a node. Example values tell storages apart where they are reliable.
        They are not where several traces left them, where the tracer gave each node a value of its own
        (``make_fx`` with real tensors), or where the graph rebinds or hides tensors.
    entangled: nodes of which one may contain, or lie on the storage of, another one.
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
from partita.graph.attributes import lookup
from partita.graph.effect_rules.node_effect import PURE, NodeEffect

__all__ = ["example_memory", "find_storages", "may_hold_memory", "metadata"]

_IMMUTABLE = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def metadata(node: Node) -> Any:
    """Return the example value that a tracer left on a node (``val`` or ``example_value``), or None."""
    meta = node.meta
    return meta["val"] if "val" in meta else meta.get("example_value")


def example_memory(node: Node) -> Any:
    """Return an example value of the graph's own trace in whose storage the node's lies. It is the node's own
    but for a node that was copied from another trace, of which ``memory`` in its meta names one.
    """
    return node.meta["memory"] if "memory" in node.meta else metadata(node)


def find_storages(
    gm: GraphModule,
    nodes: Sequence[Node],
    index: Mapping[Node, int],
    effects: Mapping[int, NodeEffect],
    *,
    distinct_inputs: bool,
    doubt_inputs: bool,
) -> tuple[list[tuple[int, ...]], dict[int, int]]:
    """Return the storage ids of each node, and the id of each tensor of the module by its storage key.

    Args:
        effects: of the nodes that are not pure, by position.
        distinct_inputs: see `analyse`.
        doubt_inputs: see `analyse`.
    """
    return _Finder(gm, nodes, index, effects).run(distinct_inputs, doubt_inputs)


class _Finder:
    """The working state of one `find_storages` call."""

    def __init__(
        self,
        gm: GraphModule,
        nodes: Sequence[Node],
        index: Mapping[Node, int],
        effects: Mapping[int, NodeEffect],
    ) -> None:
        self.gm, self.nodes, self.index, self.effects = gm, nodes, index, effects
        self.state: dict[int, int] = {}
        self.attributes: dict[int, tuple[int, ...]] = {}
        self.entangled = any(effect.entangles for effect in effects.values())
        self.mode = None if self.entangled else _common_mode(nodes, effects)

    def run(self, distinct_inputs: bool, doubt_inputs: bool) -> tuple[list[tuple[int, ...]], dict[int, int]]:
        storages: list[tuple[int, ...]] = []
        by_key: dict[int, int] = {}
        seen: set[int] = set()
        unknown_input = -1
        # Phase 1: from the operands that a value may alias, corrected by the example values.
        for position, node in enumerate(self.nodes):
            if node.op == "get_attr":
                storages.append(self._attribute(node, by_key))
                continue
            effect = self.effects.get(position, PURE)
            value = metadata(node)
            # what one node has from another one (a copy of it) says nothing of its own memory
            key = None if id(value) in seen else self._key(value)
            seen.add(id(value))
            shared = {position}
            if effect.aliases:
                aliased = {
                    identity for operand in effect.aliases for identity in storages[self.index[operand]]
                }
                # the tracer may have seen a fresh storage: a copying reshape, a converting `to`
                fresh = key is not None and not effect.writes and key not in by_key
                if aliased and not (fresh and self._have_keys(effect.aliases)):
                    shared = aliased
            elif (
                node.op == "placeholder"
                and not distinct_inputs
                and (value is None or (doubt_inputs and may_hold_memory(value)))
            ):
                # the caller may pass one tensor twice, or a view of another
                unknown_input = position if unknown_input < 0 else unknown_input
                shared = {unknown_input}
            if key is not None:
                shared.add(by_key.setdefault(key, min(shared)))
            storages.append(tuple(sorted(shared)))
        # Phase 2: ids for the tensors of called modules, which no node stands for.
        for effect in self.effects.values():
            for tensor in (*effect.state, *effect.written_state):
                self._id(storage_key(tensor))
        # Phase 3: what is entangled has the same ids.
        return self._united(storages) if self.entangled else storages, self.state

    def _attribute(self, node: Node, by_key: dict[int, int]) -> tuple[int, ...]:
        """The ids of a ``get_attr`` node; enters the keys of its tensor and of its example value."""
        value = lookup(self.gm, node)
        ids = self._ids_of(value)
        if isinstance(value, torch.Tensor):
            for tensor in (value, metadata(node)):
                if isinstance(tensor, torch.Tensor):
                    by_key.setdefault(storage_key(tensor), ids[0])
        return ids

    def _id(self, key: int) -> int:
        return self.state.setdefault(key, -1 - len(self.state))

    def _ids_of(self, value: Any) -> tuple[int, ...]:
        """A tensor has the id of its storage, any other mutable value its own and those of its tensors."""
        if isinstance(value, torch.Tensor):
            return (self._id(storage_key(value)),)
        if isinstance(value, _IMMUTABLE):
            return ()
        if id(value) not in self.attributes:
            inside = dict.fromkeys(self._id(storage_key(tensor)) for tensor in _tensors_of(value))
            self.attributes[id(value)] = (self._id(id(value)), *inside)
        return self.attributes[id(value)]

    def _key(self, value: Any) -> int | None:
        """The storage key of an example value, where it is reliable."""
        if not isinstance(value, torch.Tensor) or self.entangled or value.layout is not torch.strided:
            return None
        mode = tracing_mode_of(value)
        return storage_key(value) if mode is not None and mode is self.mode else None

    def _have_keys(self, operands: Sequence[Node]) -> bool:
        """Whether the storages of all these values are known from their example values."""
        return all(
            self._key(value) is not None
            for operand in operands
            for value in _leaves(metadata(operand))
            if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
        )

    def _united(self, storages: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Give the operands and the value of each entangling node one common id (by union-find)."""
        parent: dict[int, int] = {}

        def find(identity: int) -> int:
            root = identity
            while parent.get(root, root) != root:
                root = parent[root]
            while parent.get(identity, identity) != root:
                parent[identity], identity = root, parent[identity]
            return root

        for position, effect in self.effects.items():
            if not effect.entangles:
                continue
            united = [identity for operand in effect.aliases for identity in storages[self.index[operand]]]
            united += [self.state[storage_key(tensor)] for tensor in effect.written_state]
            united += storages[position]
            for identity in united:
                parent[find(identity)] = find(united[0])
        for key, identity in self.state.items():
            self.state[key] = find(identity)
        return [tuple(sorted({find(identity) for identity in shared})) for shared in storages]


def _common_mode(nodes: Sequence[Node], effects: Mapping[int, NodeEffect]) -> object | None:
    """The fake mode in which every example value of the graph was made.

    None where there are several, or where the values do not follow the storages (a view that shares no memory
    with its base).
    """
    common: object | None = None
    for position, node in enumerate(nodes):
        value = metadata(node)
        if not isinstance(value, torch.Tensor):
            continue
        mode = tracing_mode_of(value)
        if mode is None:
            continue
        if common is not None and mode is not common:
            return None
        common = mode
        effect = effects.get(position, PURE)
        if not effect.aliases or node.op != "call_function":
            continue
        base = node.args[0] if node.args else None
        if isinstance(base, Node) and always_aliased(node.target):
            original = metadata(base)
            if isinstance(original, torch.Tensor) and storage_key(original) != storage_key(value):
                return None
    return common


def may_hold_memory(value: Any) -> bool:
    """Return whether an example value can be, or contain, a tensor that another input shares memory with."""
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
