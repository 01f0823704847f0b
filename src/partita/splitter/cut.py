"""Building the graph of one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from partita._torch.fx import append_copy, map_arguments
from partita._torch.regions import ENTER_AUTOCAST, EXIT_AUTOCAST, EXIT_INFERENCE, SET_GRAD
from partita.graph.effects import metadata
from partita.graph.regions import INHERITED, Ambient
from partita.splitter.flow import PieceFlow

__all__ = ["CutOptions", "cut_piece"]


@dataclass(frozen=True, slots=True)
class CutOptions:
    """How pieces look: whether inputs keep the names of the original values, and whether a single output is a 1-tuple."""

    keep_input_names: bool = True
    tuple_return: bool = False


def cut_piece(
    nodes: Sequence[Node], flow: PieceFlow, ambients: Sequence[Ambient] | None, options: CutOptions, source: Graph
) -> Graph:
    """The graph of one piece: inputs, attributes, body with its regions re-entered and left, output."""
    graph = Graph(tracer_cls=source._tracer_cls)
    environment: dict[Node, Node] = {}
    for number, position in enumerate(flow.inputs):
        environment[nodes[position]] = _placeholder(graph, nodes[position], number, options)
    for position in flow.local:
        environment[nodes[position]] = append_copy(graph, nodes[position], (), {})
    find = environment.__getitem__
    if ambients is None:
        for position in flow.body:
            node = nodes[position]
            environment[node] = append_copy(graph, node, map_arguments(node.args, find), map_arguments(node.kwargs, find))
    else:
        _with_regions(graph, nodes, flow.body, ambients, environment)
    _output(graph, [environment[nodes[position]] for position in flow.outputs], options)
    return graph


def _placeholder(graph: Graph, node: Node, number: int, options: CutOptions) -> Node:
    name = node.name if options.keep_input_names else f"arg_{number}"
    created = graph.placeholder(name, type_expr=node.type)
    created.meta = node.meta.copy()
    return created


def _output(graph: Graph, values: list[Node], options: CutOptions) -> None:
    single = len(values) == 1 and not options.tuple_return
    node = graph.output(values[0] if single else tuple(values))
    known = [metadata(value) for value in values]
    if values and all(value is not None for value in known):
        key = "val" if "val" in values[0].meta else "example_value"
        node.meta[key] = known[0] if single else tuple(known)


def _with_regions(
    graph: Graph, nodes: Sequence[Node], body: list[int], ambients: Sequence[Ambient], environment: dict[Node, Node]
) -> None:
    """Emit a body so that each node finds the state that held around it, and the caller's state is back at the end."""
    state = INHERITED
    opened: list[tuple[Node, Node]] = []
    inherited_grad: Node | None = None
    find = environment.__getitem__

    def close_to(depth: int) -> None:
        while len(opened) > depth:
            original, entered = opened.pop()
            graph.call_function(EXIT_AUTOCAST if original.target is ENTER_AUTOCAST else EXIT_INFERENCE, (entered,))

    def move_to(wanted: Ambient) -> None:
        nonlocal state, inherited_grad
        common = 0
        while common < min(len(opened), len(wanted.stack)) and opened[common][0] is wanted.stack[common]:
            common += 1
        close_to(common)
        if wanted.grad is not state.grad:
            if inherited_grad is None:
                inherited_grad = graph.call_function(torch.is_grad_enabled)
            value = inherited_grad if wanted.grad is None else map_arguments(wanted.grad.args[0], find)
            graph.call_function(SET_GRAD, (value,))
        for switch in wanted.stack[common:]:
            copy = append_copy(graph, switch, map_arguments(switch.args, find), map_arguments(switch.kwargs, find))
            opened.append((switch, copy))
        state = wanted

    for position in body:
        if ambients[position] is not state:
            move_to(ambients[position])
        node = nodes[position]
        environment[node] = append_copy(graph, node, map_arguments(node.args, find), map_arguments(node.kwargs, find))
    move_to(INHERITED)
