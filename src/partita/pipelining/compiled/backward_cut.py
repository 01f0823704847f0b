"""Cuts a backward graph from AOTAutograd in two: I, the gradients of a stage's inputs, and W, the rest.

::

    saved, tangents ──┬── mm ── relu' ── mm ──> gradient of x            I: what it needs
                      └── t ── mm ──> gradient of w                      W: all else

Three things make W cheap to wait for:

- an operator that computes several gradients and can be asked for some of them (a convolution's backward) is
  asked twice, as autograd does in an eager stage;
- what crosses from I to W is a minimal cut: of a cast, a view or (where the compiler fuses) an elementwise
  result, W keeps what it is computed from where that is smaller or kept anyway, and computes it again;
- what has an effect (random numbers, a write) runs in I, so that W can run at any later time.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.operators.output_mask import ask_for_results, has_output_mask
from partita.graph.effects import analyse, metadata
from partita.pipelining.compiled.backward_graph import copied, gradients_of
from partita.pipelining.compiled.crossing import cheapest_crossing
from partita.splitter import Piece, split

__all__ = ["INPUTS", "WEIGHTS", "BackwardCut", "cut_backward"]

INPUTS, WEIGHTS = "input", "weight"
_WEIGHT = 2
"""The position of the weight among the arguments of ``convolution_backward``."""


@dataclass(frozen=True)
class BackwardCut:
    """A backward graph in two.

    Attributes:
        whole: the graph, with what is computed in both pieces standing in it twice.
        pieces: I and W, by key (`INPUTS`, `WEIGHTS`); a piece without an operation is absent.
        outputs: for each output of the graph the name of its value, None, or a constant.
    """

    whole: GraphModule
    pieces: Mapping[str, Piece]
    outputs: tuple[Any, ...]


def cut_backward(
    gm: GraphModule, wanted: Collection[int], *, static_inputs: Collection[str] = (), fuses: bool = False
) -> BackwardCut:
    """Cut a backward graph.

    Args:
        gm: flat; its nodes have example values. It is not changed.
        wanted: the positions of the outputs that I computes.
        static_inputs: names of inputs that live on anyway: they cost nothing to keep.
        fuses: whether the compiler fuses elementwise operations, so that to repeat one costs next to nothing.
    """
    gm = copied(gm)
    # 1. I is what the wanted gradients need, and what has an effect.
    effects = analyse(gm, distinct_inputs=True)
    outputs = gradients_of(gm)
    starts = [outputs[position] for position in wanted if isinstance(outputs[position], Node)]
    observable = {effects.nodes[position] for position, it in effects.by_position.items() if it.observable}
    first = _needed([*starts, *observable])
    # 2. What computes gradients for both is asked by each for its own.
    _ask_in_part(gm, first)
    for node in gm.graph.nodes:  # what takes a result apart stays with it
        if node.target is operator.getitem and node.args[0] in first:
            first.add(node)
    # 3. W keeps the least memory, and repeats what that takes.
    aliases = {effects.nodes[position]: it for position, it in effects.by_position.items() if it.aliases}
    again = cheapest_crossing(
        gm,
        first,
        fixed=observable,
        views=aliases.keys(),
        free=frozenset(static_inputs),
        fuses=fuses,
    )
    _repeat(gm, first, again)
    gm.graph.lint()
    halves = {node: INPUTS if node in first else WEIGHTS for node in _calls(gm)}
    cut = split(gm, halves, tuple_return=True)
    names = tuple(value.name if isinstance(value, Node) else value for value in gradients_of(gm))
    return BackwardCut(gm, {piece.key: piece for piece in cut.pieces}, names)


def _calls(gm: GraphModule) -> Iterator[Node]:
    return (node for node in gm.graph.nodes if node.op.startswith("call_"))


def _needed(starts: Collection[Node]) -> set[Node]:
    """The operations that these values need, themselves among them."""
    needed: set[Node] = set()
    queue = list(starts)
    while queue:
        node = queue.pop()
        if node in needed or not node.op.startswith("call_"):
            continue
        needed.add(node)
        queue += node.all_input_nodes
    return needed


def _ask_in_part(gm: GraphModule, first: set[Node]) -> None:
    """Let an operator with an ``output_mask`` stand twice where both halves need results of it, each time
    asked for the half's own results.
    """
    for node in list(_calls(gm)):
        if node not in first or not has_output_mask(node):
            continue
        results = [user for user in node.users if user.target is operator.getitem]
        mine = [user for user in results if user in first]
        others = [user for user in results if user not in first]
        if not mine or not others or len(results) != len(node.users):
            continue
        with gm.graph.inserting_before(others[0]):
            twin = gm.graph.node_copy(node, lambda value: value)
        for copy, own in ((node, mine), (twin, others)):
            ask_for_results(copy, {int(user.args[1]) for user in own})  # type: ignore[arg-type]
        for user in others:
            user.replace_input_with(node, twin)
        _forget_weight(gm, twin)


def _forget_weight(gm: GraphModule, node: Node) -> None:
    """Let a convolution's gradient of the weight take memory of the weight's shape: it reads no more of it,
    and the weight may be a copy in another layout, which W would keep.
    """
    if node.target is not torch.ops.aten.convolution_backward.default:
        return
    weight: Any = node.args[_WEIGHT]
    mask: Any = node.args[-1]
    value = metadata(weight)
    if mask[0] or any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
        return
    with gm.graph.inserting_before(node):
        blank = gm.graph.call_function(
            torch.ops.aten.empty_strided.default,
            (list(value.shape), list(value.stride())),
            {"dtype": value.dtype, "device": value.device},
        )
    blank.meta = dict(weight.meta)
    node.update_arg(_WEIGHT, blank)


def _repeat(gm: GraphModule, first: set[Node], again: Collection[Node]) -> None:
    """Let W compute for itself what it is cheaper to compute again than to keep."""
    copies: dict[Node, Node] = {}
    nodes = list(gm.graph.nodes)
    start = next((node for node in nodes if node.op.startswith("call_") and node not in first), None)
    if start is None:
        return
    # In the order of the graph, so that each finds its operands; before the first of W, after all of I.
    last = nodes[-1]
    for node in nodes:
        if node in again:
            with gm.graph.inserting_before(last):
                copies[node] = gm.graph.node_copy(node, lambda value: copies.get(value, value))
    for node in nodes:
        if node in first or not node.op.startswith("call_"):
            continue
        with gm.graph.inserting_before(last):
            moved = gm.graph.node_copy(node, lambda value: copies.get(value, value))
        copies[node] = moved
    output = gm.graph.output_node()
    weights = {node for node in copies if node not in first}
    output.args = torch.fx.map_arg(output.args, lambda value: copies[value] if value in weights else value)
    for node in reversed(nodes):
        if node in weights:
            gm.graph.erase_node(node)
