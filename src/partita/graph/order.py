"""Ordering edges: pairs of nodes whose order can be observed although no value flows between them.

For each resource (a storage, the random generators, the host) a reader follows the last writer, and a
writer follows the last writer and all readers since. So the number of edges is linear in the number of
uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from partita._torch.tensors.storage import storage_key
from partita.graph.effects import Effects
from partita.graph.use import PLAIN

__all__ = ["OrderEdge", "order_edges", "written_storages"]

_RANDOM, _HOST, _KEPT = "random", "host", "kept"


@dataclass(frozen=True, slots=True)
class OrderEdge:
    """``before`` and ``after`` (positions in the graph) must keep their order because of ``resource``."""

    before: int
    after: int
    resource: str
    """``storage``, ``random``, ``host``, ``barrier`` or ``autocast``."""


class _Resource:
    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        self.writer = -1
        self.readers: list[int] = []


def order_edges(effects: Effects) -> list[OrderEdge]:
    """All ordering edges of a graph, by their later end. The region switches are left out: they are re-
    entered, not moved.
    """
    if not effects.uses:
        return []
    edges = list(_edges(effects))
    edges.extend(_barrier_edges(effects))
    edges.sort(key=lambda edge: edge.after)
    return edges


def _edges(effects: Effects) -> Iterator[OrderEdge]:
    written = written_storages(effects)
    resources: dict[int | str, _Resource] = {}
    plain_only = not written
    kept: set[int | str] = set()  # storages that unknown code has been given, and may write at any later call
    regions = frozenset(effects.regions)
    positions = effects.uses.keys() if plain_only else range(len(effects.nodes))
    for position in positions:
        node = effects.nodes[position]
        if position in regions or node.op in ("placeholder", "get_attr", "output"):
            continue
        use = effects.uses.get(position, PLAIN)
        writes: dict[int | str, None] = {}
        reads: dict[int | str, None] = {}
        if written:
            for operand in node.all_input_nodes:
                reads.update(
                    (identity, None)
                    for identity in effects.storages[effects.index[operand]]
                    if identity in written
                )
            for operand in use.writes:
                writes.update((identity, None) for identity in effects.storages[effects.index[operand]])
            for tensor in use.state:
                identity = effects.state_storages[storage_key(tensor)]
                if identity in written:
                    reads[identity] = None
            for tensor in use.written_state:
                writes[effects.state_storages[storage_key(tensor)]] = None
            if use.unknown:
                touched = {
                    identity
                    for operand in use.aliases
                    for identity in effects.storages[effects.index[operand]]
                }
                kept.update(touched, effects.storages[position])
                writes[_KEPT] = None
            elif kept and not kept.isdisjoint(writes):
                writes[_KEPT] = None
            elif kept and any(
                not kept.isdisjoint(effects.storages[effects.index[operand]])
                for operand in node.all_input_nodes
            ):
                reads[_KEPT] = None
        if use.random:
            writes[_RANDOM] = None
        if use.host:
            writes[_HOST] = None
        for key in writes:
            resource = resources.setdefault(key, _Resource())
            name = key if key in (_RANDOM, _HOST) else "storage"
            if resource.writer >= 0:
                yield OrderEdge(resource.writer, position, name)
            for reader in resource.readers:
                yield OrderEdge(reader, position, name)
            resource.writer, resource.readers = position, []
        for key in reads:
            if key in writes:
                continue
            resource = resources.setdefault(key, _Resource())
            if resource.writer >= 0:
                yield OrderEdge(resource.writer, position, "storage")
            resource.readers.append(position)


def written_storages(effects: Effects) -> set[int]:
    """The ids, as in `Effects.storages`, of what some node writes."""
    written: set[int] = set()
    for use in effects.uses.values():
        for operand in use.writes:
            written.update(effects.storages[effects.index[operand]])
        written.update(effects.state_storages[storage_key(tensor)] for tensor in use.written_state)
    return written


def _barrier_edges(effects: Effects) -> Iterator[OrderEdge]:
    """Nothing crosses a barrier, in either direction."""
    barriers = [position for position, use in effects.uses.items() if use.barrier]
    if not barriers:
        return
    regions = frozenset(effects.regions)
    last, since = -1, list[int]()
    pending = set(barriers)
    for position, node in enumerate(effects.nodes):
        if position in regions or _stays(node):
            continue
        if last >= 0:
            yield OrderEdge(last, position, "barrier")
        if position in pending:
            for earlier in since:
                yield OrderEdge(earlier, position, "barrier")
            last, since = position, []
        else:
            since.append(position)


def _stays(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr", "output")
