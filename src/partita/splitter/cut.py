"""Building the graph of one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from partita._torch.autograd.region_switches import (
    EMPTY_CACHE,
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    SET_GRAD,
)
from partita._torch.graph_module.nodes import (
    append_copy,
    append_input,
    append_renamed,
    map_arguments,
    new_graph,
)
from partita.graph.effects import metadata
from partita.graph.regions import INHERITED, Ambient
from partita.splitter.flow import PieceFlow

__all__ = ["CutOptions", "cut_piece"]

_Copier = Callable[[Graph, Node, Any, Any], Node]


@dataclass(frozen=True, slots=True)
class CutOptions:
    """How pieces look.

    Attributes:
        keep_input_names: inputs are called as the original values, not ``arg_0``, ``arg_1``, ...
        keep_node_names: nodes are called as in the original; else they are named after what they do, counted
            in each piece.
        tuple_return: a single output is a 1-tuple.
        flat_targets: modules that a piece calls lie on it under one name, ``layers_0`` for ``layers.0``.
        outputs_by_use: outputs in the order in which others first use them, not in that of their nodes.
        attributes_first: the stitched module reads its attributes before the first piece.
    """

    keep_input_names: bool = True
    keep_node_names: bool = True
    tuple_return: bool = False
    flat_targets: bool = False
    outputs_by_use: bool = False
    attributes_first: bool = True


def cut_piece(
    nodes: Sequence[Node],
    flow: PieceFlow,
    ambients: Sequence[Ambient] | None,
    options: CutOptions,
    source: Graph,
    cache_borders: frozenset[int] = frozenset(),
) -> tuple[Graph, dict[str, str]]:
    """The graph of one piece: inputs, attributes, body with its regions re-entered and left, output.

    Args:
        cache_borders: positions before which autocast's cache is emptied, for one region gives way to
            another.

    Returns:
        The graph, and for each original attribute name the one in the piece.
    """
    graph = new_graph(source)
    environment: dict[Node, Node] = {}
    targets = _targets(nodes, flow, flat=options.flat_targets)
    copy = (
        append_copy if options.keep_node_names and not options.flat_targets else _renaming(targets, options)
    )
    for number, position in enumerate(flow.inputs):
        name = nodes[position].name if options.keep_input_names else f"arg_{number}"
        environment[nodes[position]] = append_input(graph, nodes[position], name)
    for position in flow.local:
        environment[nodes[position]] = append_copy(graph, nodes[position], (), {})
    find = environment.__getitem__
    if ambients is None:
        for position in flow.body:
            node = nodes[position]
            environment[node] = copy(
                graph, node, map_arguments(node.args, find), map_arguments(node.kwargs, find)
            )
    else:
        _with_regions(graph, nodes, flow.body, ambients, environment, copy, cache_borders)
    _output(graph, [environment[nodes[position]] for position in flow.outputs], options)
    return graph, targets


def _targets(nodes: Sequence[Node], flow: PieceFlow, *, flat: bool) -> dict[str, str]:
    """The name in the piece of each attribute that it refers to; colliding flat names get a number."""
    targets = {str(nodes[position].target): str(nodes[position].target) for position in flow.local}
    taken = {name.partition(".")[0] for name in targets}
    for position in flow.body:
        if nodes[position].op != "call_module":
            continue
        target = str(nodes[position].target)
        if target in targets:
            continue
        name = base = target.replace(".", "_") if flat else target
        number = 0
        while flat and name in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        targets[target] = name
    return targets


def _renaming(targets: dict[str, str], options: CutOptions) -> _Copier:
    def copy(graph: Graph, node: Node, args: Any, kwargs: Any) -> Node:
        target = targets[str(node.target)] if node.op == "call_module" else node.target
        if not options.keep_node_names:
            return append_renamed(graph, node, args, kwargs, target)
        made = append_copy(graph, node, args, kwargs)
        made.target = target
        return made

    return copy


def _output(graph: Graph, values: list[Node], options: CutOptions) -> None:
    single = len(values) == 1 and not options.tuple_return
    node = graph.output(values[0] if single else tuple(values))
    known = [metadata(value) for value in values]
    if values and all(value is not None for value in known):
        key = "val" if "val" in values[0].meta else "example_value"
        node.meta[key] = known[0] if single else tuple(known)


def _with_regions(
    graph: Graph,
    nodes: Sequence[Node],
    body: list[int],
    ambients: Sequence[Ambient],
    environment: dict[Node, Node],
    copy: _Copier,
    cache_borders: frozenset[int],
) -> None:
    """Emit a body so that each node finds the state that held around it, and the caller's state is back at
    the end.
    """
    state = INHERITED
    opened: list[tuple[Node, Node]] = []
    grad: Node | None = None  # the switch in force, within the innermost inference region that is open
    inherited: dict[
        Node | None, Node
    ] = {}  # for each such region (None: the piece) grad mode as it was made there
    find = environment.__getitem__

    def close_to(depth: int) -> None:
        nonlocal grad
        while len(opened) > depth:
            original, entered = opened.pop()
            if original.target is ENTER_AUTOCAST:
                graph.call_function(EXIT_AUTOCAST, (entered,))
                continue
            graph.call_function(EXIT_INFERENCE, (entered,))
            grad = state.outside[len(opened)]

    def set_grad(switch: Node | None) -> None:
        nonlocal grad
        if switch is grad:
            return
        region = next(
            (entered for original, entered in reversed(opened) if original.target is not ENTER_AUTOCAST), None
        )
        if region not in inherited:
            inherited[region] = graph.call_function(torch.is_grad_enabled)
        value = inherited[region] if switch is None else map_arguments(switch.args[0], find)
        graph.call_function(SET_GRAD, (value,))
        grad = switch

    def move_to(wanted: Ambient, *, emptied: bool = False) -> None:
        nonlocal state, grad
        common = 0
        while common < min(len(opened), len(wanted.stack)) and opened[common][0] is wanted.stack[common]:
            common += 1
        close_to(common)
        if emptied:
            graph.call_function(EMPTY_CACHE)
        for switch, outside in zip(wanted.stack[common:], wanted.outside[common:], strict=True):
            enters_inference = switch.target is not ENTER_AUTOCAST
            if enters_inference:
                set_grad(outside)
            args, kwargs = map_arguments(switch.args, find), map_arguments(switch.kwargs, find)
            opened.append((switch, append_copy(graph, switch, args, kwargs)))
            if enters_inference:
                grad = None
        set_grad(wanted.grad)
        state = wanted

    for position in body:
        if ambients[position] is not state:
            move_to(ambients[position], emptied=position in cache_borders)
        node = nodes[position]
        environment[node] = copy(
            graph, node, map_arguments(node.args, find), map_arguments(node.kwargs, find)
        )
    move_to(INHERITED)
