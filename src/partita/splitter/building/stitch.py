"""The stitched graph: it calls the pieces in order, and is called like the graph that was cut."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch.fx import Graph, Node

from partita._torch.autograd.region_switches import ENTER_CACHE_SCOPE, LEAVE_CACHE_SCOPE, SET_GRAD
from partita._torch.graph_module.nodes import append_copy, copy_codegen, map_arguments, new_graph
from partita.graph.effects import metadata
from partita.graph.regions import Ambient
from partita.splitter.decisions.flow import PieceFlow
from partita.splitter.decisions.guard import Guards, require_distinct, require_foreign

__all__ = ["SharedCache", "stitch"]


@dataclass(frozen=True, slots=True)
class SharedCache:
    """Parts ``first`` to ``last`` share one autocast region, and so its cache of converted weights."""

    first: int
    last: int


def stitch(
    source: Graph,
    nodes: Sequence[Node],
    flows: Sequence[PieceFlow],
    names: Sequence[str],
    *,
    roots: Sequence[int],
    final: Ambient,
    scopes: Sequence[SharedCache] = (),
    tuple_return: bool = False,
    attributes_first: bool = True,
    guards: Guards = Guards(),  # noqa: B008 - it is frozen
) -> Graph:
    """Build the stitched graph.

    Args:
        names: of the pieces, in the order in which they run.
        roots: positions of the ``get_attr`` nodes that stay outside of the pieces.
        final: the ambient state that the original graph leaves behind.
        guards: conditions that are checked first.
        attributes_first: attributes are read before the first piece, and not just before the piece that needs
            them.
    """
    # Inputs, attributes, checks.
    graph = new_graph(source)
    copy_codegen(source, graph)
    environment: dict[Node, Node] = {}
    wanted = frozenset(roots) if attributes_first else frozenset()
    for position, node in enumerate(nodes):
        if node.op == "placeholder" or position in wanted:
            environment[node] = append_copy(graph, node, node.args, node.kwargs)
    _check_first(
        graph,
        guards,
        [environment.get(node) for node in nodes],
        [*names, *(str(nodes[position].target) for position in roots)],
    )
    # The pieces, within the autocast caches that they share.
    read = partial(_read, graph, environment)
    opening = Counter(scope.first for scope in scopes)
    closing = Counter(scope.last for scope in scopes)
    scopes_open: list[Node] = []
    for part, (flow, name) in enumerate(zip(flows, names, strict=True)):
        scopes_open += [graph.call_function(ENTER_CACHE_SCOPE) for _ in range(opening[part])]
        call = graph.call_module(name, tuple(read(nodes[position]) for position in flow.inputs))
        _bind_outputs(graph, call, flow, nodes, environment, tuple_return=tuple_return)
        for _ in range(closing[part]):
            graph.call_function(LEAVE_CACHE_SCOPE, (scopes_open.pop(),))
    # The state that is left behind, and the output.
    if final.grad is not None:
        graph.call_function(SET_GRAD, map_arguments(final.grad.args, environment.__getitem__))
    for position in roots:
        read(nodes[position])
    output = nodes[-1]
    append_copy(graph, output, map_arguments(output.args, environment.__getitem__), {})
    return graph


def _check_first(graph: Graph, guards: Guards, placed: Sequence[Node | None], owned: Sequence[str]) -> None:
    """Add the checks of the guards.

    Args:
        placed: for each position its node in the stitched graph, where there is one already.
        owned: names of the pieces and attributes in which the model's tensors are.
    """

    def inputs(positions: Iterable[int]) -> tuple[tuple[str, ...], list[Node]]:
        nodes = [node for position in positions if (node := placed[position]) is not None]
        return tuple(node.name for node in nodes), nodes

    if guards.distinct is not None:
        names, values = inputs((*guards.distinct.written, *guards.distinct.others))
        checked = (names, len(guards.distinct.written), values, guards.distinct.places)
        graph.call_function(require_distinct, checked)
    if guards.foreign:
        names, values = inputs(guards.foreign)
        graph.call_function(require_foreign, (names, values, [graph.get_attr(name) for name in owned]))


def _read(graph: Graph, environment: dict[Node, Node], node: Node) -> Node:
    """The node of the stitched graph for an original value; an attribute is read on first use."""
    if node not in environment and node.op == "get_attr":
        environment[node] = append_copy(graph, node, (), {})
    return environment[node]


def _bind_outputs(
    graph: Graph,
    call: Node,
    flow: PieceFlow,
    nodes: Sequence[Node],
    environment: dict[Node, Node],
    *,
    tuple_return: bool,
) -> None:
    """Let nodes of the stitched graph stand for the outputs of a piece, with their metadata."""
    originals = [nodes[position] for position in flow.outputs]
    if not originals:
        return
    if len(originals) == 1 and not tuple_return:
        call.meta = {key: value for key, value in originals[0].meta.items() if key in _VALUE_KEYS}
        environment[originals[0]] = call
        return
    key = "val" if "val" in originals[0].meta else "example_value"
    if any(metadata(original) is not None for original in originals):
        call.meta[key] = tuple(metadata(original) for original in originals)
    for number, original in enumerate(originals):
        item = graph.call_function(operator.getitem, (call, number), type_expr=original.type)
        item.meta = {key: value for key, value in original.meta.items() if key in _VALUE_KEYS}
        environment[original] = item


_VALUE_KEYS = frozenset(
    {"val", "example_value", "tensor_meta", "stack_trace", "nn_module_stack", "source_fn_stack", "custom"}
)
