"""From a graph and an assignment to ordered parts: everything that is decided before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule, Node

from partita._torch.tensors.storage import storage_key
from partita.errors import GraphError, OrderConflict
from partita.graph.casts import Casts, find_casts
from partita.graph.effects import Effects, analyse, metadata
from partita.graph.order import OrderEdge, order_edges, written_storages
from partita.graph.regions import INHERITED, Ambient, ambient_states
from partita.graph.storages import may_hold_memory
from partita.graph.use import PLAIN
from partita.splitter.assignment import Assignment, assigned_keys, is_assignable
from partita.splitter.caching import cache_borders, order_with_casts
from partita.splitter.guard import DistinctInputs, Guards
from partita.splitter.ordering import Dependence, Parts, order_pieces

__all__ = ["Analysis", "analyse_split"]


@dataclass(frozen=True)
class Analysis:
    """The decisions.

    Attributes:
        effects: of the graph.
        keys: of the assigned pieces, by first appearance.
        parts: which node runs in which part, and the order of the parts.
        ambients: the state that holds at each position; None where the graph has no regions.
        final: the state that the graph leaves behind.
        reordered: whether some node runs before one that stood ahead of it.
        cache_borders: positions before which autocast's cache of converted weights is emptied.
        guards: what must be so for this order to be right.
    """

    effects: Effects
    keys: list[Any]
    parts: Parts
    ambients: list[Ambient] | None
    final: Ambient
    reordered: bool
    guards: Guards = field(default_factory=Guards)
    cache_borders: frozenset[int] = frozenset()


def analyse_split(
    gm: GraphModule, assignment: Assignment, *, repair: bool, doubt_inputs: bool = False
) -> Analysis:
    """Decide everything about a split.

    Args:
        doubt_inputs: see `analyse`. Where the order is right only for inputs that share no memory, `guards`
            says so.

    Raises:
        GraphError: the graph is malformed.
        AssignmentError: see `assigned_keys`.
        RegionError: see `ambient_states`.
        OrderConflict: the pieces can't be ordered and ``repair`` is off.
    """
    _check(list(gm.graph.nodes))
    effects = analyse(gm, doubt_inputs=doubt_inputs)
    nodes = effects.nodes
    keys = assigned_keys(assignment, nodes, effects.regions)
    piece_of, distinct = _number(keys, nodes, frozenset(effects.regions))
    names = [f"piece {key!r}" for key in distinct]
    runs, final = ambient_states(nodes, effects.regions)
    ambients = _spread(runs, len(nodes)) if effects.regions else None
    casts = find_casts(gm, effects, ambients) if ambients is not None else None
    doubtful = _doubtful_inputs(nodes, doubt_inputs)
    effects, parts, guards = _legal(gm, effects, piece_of, names, casts, doubtful, repair=repair)
    reordered = _is_reordered(parts.part_of)
    if reordered:
        guards = replace(guards, foreign=_not_to_be_owned(effects, parts.part_of, doubtful))
    return Analysis(
        effects, distinct, parts, ambients, final, reordered, guards, cache_borders(casts, parts.part_of)
    )


def _legal(
    gm: GraphModule,
    effects: Effects,
    piece_of: list[int],
    names: list[str],
    casts: Casts | None,
    doubtful: tuple[int, ...],
    *,
    repair: bool,
) -> tuple[Effects, Parts, Guards]:
    """An order that is right whatever the caller does; where there is none, one that is right under
    conditions; where there is none, pieces are divided.
    """
    try:
        return effects, _order(effects, piece_of, names, casts, repair=False), Guards()
    except OrderConflict:
        apart, distinct = _with_distinct_inputs(gm, effects, doubtful)
    try:
        return apart, _order(apart, piece_of, names, casts, repair=False), Guards(distinct)
    except OrderConflict:
        if not repair:
            raise
    return effects, _order(effects, piece_of, names, casts, repair=True), Guards()


def _order(
    effects: Effects, piece_of: list[int], names: list[str], casts: Casts | None, *, repair: bool
) -> Parts:
    storage = order_edges(effects)

    def order(extra: list[OrderEdge]) -> Parts:
        edges = sorted([*storage, *extra], key=lambda edge: edge.after) if extra else storage
        crossings = _crossings(effects, piece_of, edges)
        return order_pieces(
            effects.nodes, piece_of, names, crossings, _inner(effects, piece_of, edges), repair=repair
        )

    return order_with_casts(order, casts, piece_of, repair=repair)


def _doubtful_inputs(nodes: list[Node], doubt_inputs: bool) -> tuple[int, ...]:
    """Positions of the inputs that may be given any tensor: those without metadata, and where these are
    doubted too, those whose metadata says that they can hold memory.
    """
    return tuple(
        position
        for position, node in enumerate(nodes)
        if node.op == "placeholder"
        and ((value := metadata(node)) is None or (doubt_inputs and may_hold_memory(value)))
    )


def _with_distinct_inputs(
    gm: GraphModule, effects: Effects, doubtful: tuple[int, ...]
) -> tuple[Effects, DistinctInputs | None]:
    """The effects if no two inputs share memory but those that did when the graph was traced, and what has
    to be checked then; as they were where that makes no difference.
    """
    if len(doubtful) < 2 or not effects.storages:
        return effects, None
    assumed = analyse(gm, distinct_inputs=True)
    written_ids = written_storages(assumed)
    written = tuple(position for position in doubtful if written_ids.intersection(assumed.storages[position]))
    if not written:
        return effects, None
    others = tuple(position for position in doubtful if position not in set(written))
    places = tuple(min(assumed.storages[position]) for position in (*written, *others))
    return assumed, DistinctInputs(written, others, places)


def _not_to_be_owned(effects: Effects, part_of: list[int], inputs: tuple[int, ...]) -> tuple[int, ...]:
    """Of the doubtful inputs those (all or none) that must not be the model's own tensors, since a use of
    one and a use of the model's own tensors, one of them a write, have changed places.
    """
    if not inputs or not effects.storages:
        return ()
    of_inputs = {identity for position in inputs for identity in effects.storages[position]}
    of_state = {identity for shared in effects.storages for identity in shared if identity < 0}
    of_state.update(effects.state_storages.values())
    latest = dict.fromkeys(("input", "input written", "state", "state written"), -1)
    against = {
        "input": "state written",
        "input written": "state",
        "state": "input written",
        "state written": "input",
    }
    for position, part in enumerate(part_of):
        if part < 0:
            continue
        touched, written = _touched(effects, position)
        uses = [
            what
            for what, there in (
                ("input", touched & of_inputs),
                ("input written", written & of_inputs),
                ("state", touched & of_state),
                ("state written", written & of_state),
            )
            if there
        ]
        if any(latest[against[what]] > part for what in uses):
            return inputs
        for what in uses:
            latest[what] = max(latest[what], part)
    return ()


def _touched(effects: Effects, position: int) -> tuple[set[int], set[int]]:
    """The storages that a node reads or writes, and those that it writes."""
    node, use = effects.nodes[position], effects.uses.get(position, PLAIN)
    touched = {
        identity for operand in node.all_input_nodes for identity in effects.storages[effects.index[operand]]
    }
    written = {identity for operand in use.writes for identity in effects.storages[effects.index[operand]]}
    written |= {effects.state_storages[storage_key(tensor)] for tensor in use.written_state}
    touched |= {effects.state_storages[storage_key(tensor)] for tensor in use.state}
    return touched | written, written


def _check(nodes: list[Node]) -> None:
    """What ``Graph.lint`` would find: operands stand before their users, names are unique, one output stands
    at the end.
    """
    index = {node: position for position, node in enumerate(nodes)}
    if not nodes or nodes[-1].op != "output":
        raise GraphError("the graph does not end in an output node: add one with graph.output(...)")
    names: set[str] = set()
    for position, node in enumerate(nodes):
        if node.name in names:
            raise GraphError(
                f"two nodes are called {node.name!r}: rename one (graph.lint() finds the first such pair)"
            )
        names.add(node.name)
        if node.op == "output" and position != len(nodes) - 1:
            raise GraphError(
                f"node {nodes[position + 1].name!r} stands behind the output {node.name!r}: erase it, or "
                "move it up"
            )
        for operand in node.all_input_nodes:
            if operand not in index:
                raise GraphError(
                    f"node {node.name!r} uses {operand.name!r}, which is not in the graph (erased, or of "
                    "another graph): replace its use with node.replace_input_with(...)"
                )
            if index[operand] >= position:
                raise GraphError(
                    f"node {node.name!r} uses {operand.name!r}, which does not stand before it in the graph: "
                    "order the nodes (graph.lint() shows the first such place)"
                )


def _number(keys: list[Any], nodes: list[Node], regions: frozenset[int]) -> tuple[list[int], list[Any]]:
    """Pieces numbered by first appearance; switches of a region belong to none."""
    numbers: dict[Any, int] = {}
    piece_of = [
        numbers.setdefault(key, len(numbers)) if is_assignable(node) and position not in regions else -1
        for position, (key, node) in enumerate(zip(keys, nodes, strict=True))
    ]
    return piece_of, list(numbers)


def _crossings(effects: Effects, piece_of: list[int], edges: list[OrderEdge]) -> list[Dependence]:
    nodes, index = effects.nodes, effects.index
    found: dict[tuple[int, int, int], Dependence] = {}
    for position, node in enumerate(nodes):
        piece = piece_of[position]
        if piece < 0:
            continue
        for operand in node.all_input_nodes:
            source = index[operand]
            origin = piece_of[source]
            if origin >= 0 and origin != piece:
                found[source, position, 0] = Dependence(source, position, "it uses its value")
    for edge in edges:
        if piece_of[edge.before] != piece_of[edge.after]:
            found.setdefault(
                (edge.before, edge.after, 1), Dependence(edge.before, edge.after, _why(effects, edge))
            )
    return list(found.values())


def _inner(effects: Effects, piece_of: list[int], edges: list[OrderEdge]) -> Iterator[tuple[int, int]]:
    """Dependences within one piece, read only where a piece must be divided."""
    nodes, index = effects.nodes, effects.index
    for position, node in enumerate(nodes):
        for operand in node.all_input_nodes if piece_of[position] >= 0 else ():
            if piece_of[index[operand]] == piece_of[position]:
                yield index[operand], position
    for edge in edges:
        if piece_of[edge.before] == piece_of[edge.after]:
            yield edge.before, edge.after


def _why(effects: Effects, edge: OrderEdge) -> str:
    if edge.resource == "random":
        return "both draw random numbers"
    if edge.resource == "host":
        return "both have side effects that the host can see"
    if edge.resource == "autocast":
        return (
            "they use one weight under autocast, or stand in two autocast regions that share weights, and "
            "its cache would be lost"
        )
    if edge.resource == "barrier":
        return "one of them changes global state"
    reasons = [
        f"{effects.nodes[position].name!r} writes ({use.why})"
        for position in (edge.before, edge.after)
        if (use := effects.uses.get(position)) is not None and (use.writes or use.written_state)
    ]
    return "they share a storage that " + " and ".join(reasons)


def _spread(runs: list[tuple[int, Ambient]], count: int) -> list[Ambient]:
    states = [INHERITED] * count
    for (start, state), (end, _) in zip(runs, [*runs[1:], (count, INHERITED)], strict=True):
        states[start:end] = [state] * (end - start)
    return states


def _is_reordered(part_of: list[int]) -> bool:
    last = -1
    for part in part_of:
        if part >= 0:
            if part < last:
                return True
            last = part
    return False
