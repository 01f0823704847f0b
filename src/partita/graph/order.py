"""Ordering edges: pairs of nodes whose order can be observed although no value flows between them.

Terms:
    resource: something that nodes read or write besides their operands' values: a storage, the random
        generators, the host.
    ordering edge: for each resource, a reader follows the last writer, and a writer follows the last writer
        and all readers since. So the number of edges is linear in the number of reads and writes.
    retained storage: one that unknown code was given. The code may have kept it and write to it in any later
        call, so each call of unknown code writes one more resource, which all nodes that use such a storage
        read.
    barrier: a node that changes interpreter-wide state; no other node may be moved across it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from partita._torch.tensors.storage import storage_key
from partita.graph.effect_rules.node_effect import PURE
from partita.graph.effects import Effects

__all__ = ["OrderEdge", "order_edges", "written_storages"]

_RANDOM, _HOST, _RETAINED = "random", "host", "retained"
_NOT_ORDERED = frozenset({"placeholder", "get_attr", "output"})


@dataclass(frozen=True, slots=True)
class OrderEdge:
    """``before`` and ``after`` (positions in the graph) must keep their order because of ``resource``."""

    before: int
    after: int
    resource: str
    """``storage``, ``random``, ``host``, ``barrier`` or ``autocast``."""


class _Resource:
    """The last writer of a resource, and its readers since."""

    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        self.writer = -1
        self.readers: list[int] = []


def order_edges(effects: Effects) -> list[OrderEdge]:
    """Return all ordering edges of a graph, sorted by their later end.

    The switches of regions have none: they are re-entered in each piece, not moved.
    """
    if not effects.by_position:
        return []
    edges = [*_resource_edges(effects), *_barrier_edges(effects)]
    edges.sort(key=lambda edge: edge.after)
    return edges


def written_storages(effects: Effects) -> set[int]:
    """Return the storage ids, as in `Effects.storages`, that some node writes."""
    written: set[int] = set()
    for effect in effects.by_position.values():
        written.update(effects.storages_written(effect))
    return written


def _resource_edges(effects: Effects) -> Iterator[OrderEdge]:
    written = written_storages(effects)
    retained: set[int] = set()
    resources: dict[int | str, _Resource] = {}
    # Where no storage is written, pure nodes have no part in any order.
    for position in _ordered(effects, range(len(effects.nodes)) if written else effects.by_position):
        reads, writes = _accesses(effects, position, written, retained)
        # Writes first: what a node both reads and writes it follows as a writer.
        for key in writes:
            resource = resources.setdefault(key, _Resource())
            name = key if key in (_RANDOM, _HOST) else "storage"
            if resource.writer >= 0:
                yield OrderEdge(resource.writer, position, str(name))
            for reader in resource.readers:
                yield OrderEdge(reader, position, str(name))
            resource.writer, resource.readers = position, []
        for key in reads:
            if key in writes:
                continue
            resource = resources.setdefault(key, _Resource())
            if resource.writer >= 0:
                yield OrderEdge(resource.writer, position, "storage")
            resource.readers.append(position)


def _accesses(
    effects: Effects, position: int, written: set[int], retained: set[int]
) -> tuple[dict[int | str, None], dict[int | str, None]]:
    """The resources that a node reads, and those that it writes; adds to ``retained``."""
    effect = effects.by_position.get(position, PURE)
    reads: dict[int | str, None] = {}
    writes: dict[int | str, None] = {}
    if written:
        storages, index = effects.storages, effects.index
        operands = effects.nodes[position].all_input_nodes
        for operand in operands:
            for identity in storages[index[operand]]:
                if identity in written:
                    reads[identity] = None
        for tensor in effect.state:
            identity = effects.state_storages[storage_key(tensor)]
            if identity in written:
                reads[identity] = None
        if effect is not PURE:
            writes.update(dict.fromkeys(effects.storages_written(effect)))
        if effect.unknown:
            retained.update(effects.storages_of(effect.aliases), storages[position])
            writes[_RETAINED] = None
        elif retained and not retained.isdisjoint(writes):
            writes[_RETAINED] = None
        elif retained and not retained.isdisjoint(effects.storages_of(operands)):
            reads[_RETAINED] = None
    if effect.random:
        writes[_RANDOM] = None
    if effect.host:
        writes[_HOST] = None
    return reads, writes


def _barrier_edges(effects: Effects) -> Iterator[OrderEdge]:
    barriers = {position for position, effect in effects.by_position.items() if effect.barrier}
    if not barriers:
        return
    last_barrier, since = -1, list[int]()
    for position in _ordered(effects, range(len(effects.nodes))):
        if last_barrier >= 0:
            yield OrderEdge(last_barrier, position, "barrier")
        if position in barriers:
            for earlier in since:
                yield OrderEdge(earlier, position, "barrier")
            last_barrier, since = position, []
        else:
            since.append(position)


def _ordered(effects: Effects, positions: Iterable[int]) -> Iterator[int]:
    """Those of the positions that can have an order: of nodes that go into a piece."""
    regions = frozenset(effects.regions)
    for position in positions:
        if position not in regions and effects.nodes[position].op not in _NOT_ORDERED:
            yield position
