"""From a graph and an assignment to ordered parts: everything that is decided before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from partita.errors import GraphError
from partita.graph.effects import Effects, analyse
from partita.graph.order import OrderEdge, order_edges
from partita.graph.regions import INHERITED, Ambient, ambient_states
from partita.splitter.assignment import Assignment, assigned_keys, is_assignable
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
    """

    effects: Effects
    keys: list[Any]
    parts: Parts
    ambients: list[Ambient] | None
    final: Ambient
    reordered: bool


def analyse_split(gm: GraphModule, assignment: Assignment, *, repair: bool) -> Analysis:
    """Decide everything about a split.

    Raises:
        GraphError: the graph is malformed.
        AssignmentError: see `assigned_keys`.
        RegionError: see `ambient_states`.
        OrderConflict: the pieces can't be ordered and ``repair`` is off.
    """
    effects = analyse(gm)
    nodes = effects.nodes
    _check_sorted(effects)
    keys = assigned_keys(assignment, nodes, effects.regions)
    piece_of, distinct = _number(keys, nodes, frozenset(effects.regions))
    edges = order_edges(effects)
    crossings = _crossings(effects, piece_of, edges)
    parts = order_pieces(
        nodes, piece_of, [f"piece {key!r}" for key in distinct], crossings, _inner(effects, piece_of, edges), repair=repair
    )
    runs, final = ambient_states(nodes, effects.regions)
    ambients = _spread(runs, len(nodes)) if effects.regions else None
    return Analysis(effects, distinct, parts, ambients, final, _is_reordered(parts.part_of))


def _check_sorted(effects: Effects) -> None:
    """Every operand stands before its user, and there is one output, at the end."""
    nodes, index = effects.nodes, effects.index
    if not nodes or nodes[-1].op != "output":
        raise GraphError("the graph does not end in an output node: add one with graph.output(...)")
    for position, node in enumerate(nodes):
        for operand in node.all_input_nodes:
            if index.get(operand, position) >= position:
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
            found.setdefault((edge.before, edge.after, 1), Dependence(edge.before, edge.after, _why(effects, edge)))
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
