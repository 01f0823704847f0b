"""All decisions about a split, made before anything is built.

Terms:
    piece: what the user's assignment gives one key.
    part: what runs in one go; a piece, or one of the parts that a repair divides it into.
    doubtful input: one whose tensor may share memory with another input or with the model.
    guards: conditions on the doubtful inputs under which the order of the parts is right; each run checks
        them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule, Node

from partita._torch.tensors.storage import storage_key
from partita.errors import GraphError, OrderConflict
from partita.garbage import no_garbage_collection
from partita.graph.casts import Casts, find_casts
from partita.graph.effect_rules.node_effect import PURE
from partita.graph.effects import Effects, analyse, metadata
from partita.graph.order import OrderEdge, order_edges, written_storages
from partita.graph.regions import INHERITED, Ambient, ambient_states
from partita.graph.storages import may_hold_memory
from partita.splitter.decisions.assignment import Assignment, assigned_keys, is_assignable
from partita.splitter.decisions.caching import cache_borders, order_with_casts
from partita.splitter.decisions.guard import DistinctInputs, Guards
from partita.splitter.decisions.ordering import Dependence, Parts, order_pieces

__all__ = ["Analysis", "analyse_split"]


@dataclass(frozen=True)
class Analysis:
    """The decisions about one split.

    Attributes:
        effects: of the graph.
        keys: of the assigned pieces, by first appearance.
        parts: which node runs in which part, and the order of the parts.
        ambients: the ambient state at each position; None where the graph has no regions.
        final: the ambient state that the graph leaves behind.
        reordered: whether some node runs before one that precedes it in the graph.
        guards: conditions on the inputs under which this order is right.
        cache_borders: positions before which autocast's cache of converted weights is emptied.
    """

    effects: Effects
    keys: list[Any]
    parts: Parts
    ambients: list[Ambient] | None
    final: Ambient
    reordered: bool
    guards: Guards = field(default_factory=Guards)
    cache_borders: frozenset[int] = frozenset()


@no_garbage_collection()
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
    # What the graph does, and which piece each node is assigned to.
    _check(list(gm.graph.nodes))
    effects = analyse(gm, doubt_inputs=doubt_inputs)
    nodes = effects.nodes
    keys = assigned_keys(assignment, nodes, effects.regions)
    piece_of, distinct = _number(keys, nodes, frozenset(effects.regions))
    names = [f"piece {key!r}" for key in distinct]
    # Which ambient state each node needs, and which nodes share autocast's cache.
    runs, final = ambient_states(nodes, effects.regions)
    ambients = _spread(runs, len(nodes)) if effects.regions else None
    casts = find_casts(gm, effects, ambients) if ambients is not None else None
    # An order of the parts, and what it assumes about the inputs.
    doubtful = _doubtful_inputs(nodes, doubt_inputs)
    effects, parts, guards = _ordered_parts(gm, effects, piece_of, names, casts, doubtful, repair=repair)
    reordered = _is_reordered(parts.part_of)
    if reordered:
        guards = replace(guards, foreign=_inputs_not_the_models(effects, parts.part_of, doubtful))
    return Analysis(
        effects, distinct, parts, ambients, final, reordered, guards, cache_borders(casts, parts.part_of)
    )


def _ordered_parts(
    gm: GraphModule,
    effects: Effects,
    piece_of: list[int],
    names: list[str],
    casts: Casts | None,
    doubtful: tuple[int, ...],
    *,
    repair: bool,
) -> tuple[Effects, Parts, Guards]:
    """Find an order that is right for all inputs; else one that is right under guards; else divide pieces."""
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
    """Positions of the inputs without metadata; with ``doubt_inputs``, of all that can be tensors."""
    return tuple(
        position
        for position, node in enumerate(nodes)
        if node.op == "placeholder"
        and ((value := metadata(node)) is None or (doubt_inputs and may_hold_memory(value)))
    )


def _with_distinct_inputs(
    gm: GraphModule, effects: Effects, doubtful: tuple[int, ...]
) -> tuple[Effects, DistinctInputs | None]:
    """The effects if only those inputs share memory that did when the graph was traced, and the guard for it.

    The given effects, and no guard, where that assumption makes no difference.
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


def _inputs_not_the_models(effects: Effects, part_of: list[int], inputs: tuple[int, ...]) -> tuple[int, ...]:
    """The doubtful inputs (all or none) that must not be tensors of the model.

    That is so where an access to one of them and an access to a tensor of the model, at least one of the two
    a write, have changed places.
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
        accesses = [
            access
            for access, storages in (
                ("input", touched & of_inputs),
                ("input written", written & of_inputs),
                ("state", touched & of_state),
                ("state written", written & of_state),
            )
            if storages
        ]
        if any(latest[against[access]] > part for access in accesses):
            return inputs
        for access in accesses:
            latest[access] = max(latest[access], part)
    return ()


def _touched(effects: Effects, position: int) -> tuple[set[int], set[int]]:
    """The storages that a node reads or writes, and those that it writes."""
    effect = effects.by_position.get(position, PURE)
    written = set(effects.storages_written(effect))
    touched = set(effects.storages_of(effects.nodes[position].all_input_nodes)) | written
    touched |= {effects.state_storages[storage_key(tensor)] for tensor in effect.state}
    return touched, written


def _check(nodes: list[Node]) -> None:
    """Refuse what ``Graph.lint`` would: operands after their users, repeated names, no output at the end."""
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
    """Number the pieces by first appearance; the switches of regions belong to none (-1)."""
    numbers: dict[Any, int] = {}
    piece_of = [
        numbers.setdefault(key, len(numbers)) if is_assignable(node) and position not in regions else -1
        for position, (key, node) in enumerate(zip(keys, nodes, strict=True))
    ]
    return piece_of, list(numbers)


def _crossings(effects: Effects, piece_of: list[int], edges: list[OrderEdge]) -> list[Dependence]:
    """Dependences between nodes of different pieces, each once, with its reason."""
    nodes, index = effects.nodes, effects.index
    crossings: dict[tuple[int, int, int], Dependence] = {}
    for position, node in enumerate(nodes):
        piece = piece_of[position]
        if piece < 0:
            continue
        for operand in node.all_input_nodes:
            source = index[operand]
            origin = piece_of[source]
            if origin >= 0 and origin != piece:
                crossings[source, position, 0] = Dependence(source, position, "it uses its value")
    for edge in edges:
        if piece_of[edge.before] != piece_of[edge.after]:
            dependence = Dependence(edge.before, edge.after, _why(effects, edge))
            crossings.setdefault((edge.before, edge.after, 1), dependence)
    return list(crossings.values())


def _inner(effects: Effects, piece_of: list[int], edges: list[OrderEdge]) -> Iterator[tuple[int, int]]:
    """Dependences within one piece; a generator, since they are read only where a piece must be divided."""
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
        f"{effects.nodes[position].name!r} writes ({effect.why})"
        for position in (edge.before, edge.after)
        if (effect := effects.by_position.get(position)) is not None
        and (effect.writes or effect.written_state)
    ]
    return "they share a storage that " + " and ".join(reasons)


def _spread(runs: list[tuple[int, Ambient]], count: int) -> list[Ambient]:
    """The state at each position, from the positions where it changes."""
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
