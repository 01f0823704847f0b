"""Building the graph of one piece."""

from __future__ import annotations

import itertools
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
from partita.splitter.decisions.flow import PieceFlow

__all__ = ["CutOptions", "cut_piece"]

_Copier = Callable[[Graph, Node, Any, Any], Node]


@dataclass(frozen=True, slots=True)
class CutOptions:
    """What pieces, and the stitched module, look like.

    Attributes:
        keep_input_names: inputs are called as the original values, not ``arg_0``, ``arg_1``, ...
        keep_node_names: nodes are called as in the original; else after their targets, counted in each piece.
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
    """Build the graph of one piece: inputs, attributes, body with its regions, output.

    Args:
        cache_borders: positions before which autocast's cache is emptied, since one region follows another.

    Returns:
        The graph, and for the original name of each attribute its name in the piece.
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
    regions = _Regions(graph, environment)
    for position in flow.body:
        node = nodes[position]
        if ambients is not None:
            regions.move_to(ambients[position], empty_cache=position in cache_borders)
        environment[node] = copy(
            graph, node, map_arguments(node.args, find), map_arguments(node.kwargs, find)
        )
    regions.move_to(INHERITED)
    _output(graph, [environment[nodes[position]] for position in flow.outputs], options)
    return graph, targets


def _targets(nodes: Sequence[Node], flow: PieceFlow, *, flat: bool) -> dict[str, str]:
    """The name in the piece of each attribute; flat names that collide get a number."""
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
        copied = append_copy(graph, node, args, kwargs)
        copied.target = target
        return copied

    return copy


def _output(graph: Graph, values: list[Node], options: CutOptions) -> None:
    single = len(values) == 1 and not options.tuple_return
    node = graph.output(values[0] if single else tuple(values))
    examples = [metadata(value) for value in values]
    if values and all(example is not None for example in examples):
        key = "val" if "val" in values[0].meta else "example_value"
        node.meta[key] = examples[0] if single else tuple(examples)


class _Regions:
    """Enters regions in the graph of a piece, so that each node finds its ambient state, and leaves them.

    Attributes:
        state: the ambient state that the nodes so far lead to.
        opened: the open regions, outermost first: the switch in the original graph, and its copy here.
        grad: the switch that set grad mode, within the innermost open inference region.
        inherited: for each such region (None: the piece) the node that reads grad mode as it was made there.
    """

    def __init__(self, graph: Graph, environment: dict[Node, Node]) -> None:
        self.graph = graph
        self.find = environment.__getitem__
        self.state = INHERITED
        self.opened: list[tuple[Node, Node]] = []
        self.grad: Node | None = None
        self.inherited: dict[Node | None, Node] = {}

    def move_to(self, ambient: Ambient, *, empty_cache: bool = False) -> None:
        """Add the switches that lead from the present state to ``ambient``."""
        if ambient is self.state:
            return
        # Leave the regions that are not open there, innermost first.
        pairs = zip(self.opened, ambient.stack, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] is pair[1], pairs))
        while len(self.opened) > common:
            self._leave()
        if empty_cache:
            self.graph.call_function(EMPTY_CACHE)
        # Enter the others; an inference region with the grad mode that was set around it.
        for switch, outside in zip(ambient.stack[common:], ambient.outside[common:], strict=True):
            enters_inference = switch.target is not ENTER_AUTOCAST
            if enters_inference:
                self._set_grad(outside)
            args, kwargs = map_arguments(switch.args, self.find), map_arguments(switch.kwargs, self.find)
            self.opened.append((switch, append_copy(self.graph, switch, args, kwargs)))
            if enters_inference:
                self.grad = None
        self._set_grad(ambient.grad)
        self.state = ambient

    def _leave(self) -> None:
        switch, entered = self.opened.pop()
        if switch.target is ENTER_AUTOCAST:
            self.graph.call_function(EXIT_AUTOCAST, (entered,))
            return
        self.graph.call_function(EXIT_INFERENCE, (entered,))
        self.grad = self.state.outside[len(self.opened)]

    def _set_grad(self, switch: Node | None) -> None:
        """Set grad mode as ``switch`` does; None: as it was made in the innermost open inference region."""
        if switch is self.grad:
            return
        inference = (
            entered for original, entered in reversed(self.opened) if original.target is not ENTER_AUTOCAST
        )
        region = next(inference, None)
        if region not in self.inherited:
            self.inherited[region] = self.graph.call_function(torch.is_grad_enabled)
        value = self.inherited[region] if switch is None else map_arguments(switch.args[0], self.find)
        self.graph.call_function(SET_GRAD, (value,))
        self.grad = switch
