"""Masks that each stage works out itself, where they have more bytes than what they follow from.

An attention mask of L × L follows from lengths, or from a padding mask of L, and does not need to travel::

    stage 0   padding [2, L] ── mask [2, 1, L, L] ── attention        stage 0   padding ── mask ── attention
                                      │                                           │
    stage 1                           └───────────── attention  -->   stage 1     └─────── mask ── attention
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod

from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.export.open_sizes import size_at
from partita.capture.open_sizes.sizes import Sizes
from partita.graph.effect_rules.conditions import depends_on_branch
from partita.graph.effects import analyse, metadata
from partita.graph.levels import inside_levels

__all__ = ["repeat_masks"]

_Followers = Mapping[Node, frozenset[Node]]
"""Nodes that follow from integer inputs (or from none) alone, each with these inputs."""


def repeat_masks(whole: GraphModule, assignment: dict[str, int]) -> None:
    """Give later stages copies of what follows from integer and boolean inputs alone, in place, where that
    sends fewer bytes.

    Such values have no gradient, and whoever computes them gets the same. Copied are pure operations on
    memory that nobody writes to; what the model returns is sent as it is.

    Args:
        assignment: the stage of each node that computes; it is changed, and the copies are added.
    """
    followers = _followers(whole)
    copies: dict[tuple[Node, int], Node] = {}
    replaced: list[Node] = []
    for stage in sorted(set(assignment.values())):
        for value in _cheaper_to_repeat(whole, followers, assignment, stage):
            own = _copied(whole, assignment, copies, value, stage)
            for user in [user for user in value.users if assignment.get(user.name) == stage]:
                if user is not own and user not in copies.values():
                    user.replace_input_with(value, own)
            replaced.append(value)
    if not copies:
        return
    _erase_unused(whole, assignment, followers, replaced)
    whole.graph.lint()
    whole.recompile()


def _followers(whole: GraphModule) -> dict[Node, frozenset[Node]]:
    effects, numbers, inside = analyse(whole), Sizes.of(whole).numbers, inside_levels(whole)
    written = effects.written
    followers: dict[Node, frozenset[Node]] = {}
    for position, node in enumerate(effects.nodes):
        value = metadata(node)
        if node.name in numbers:
            followers[node] = frozenset()  # every rank knows the sizes
        if node.name in numbers or not isinstance(value, Tensor):
            continue
        if value.requires_grad or (written and not written.isdisjoint(effects.storages_of([node]))):
            continue
        if node.op == "placeholder" and not (value.is_floating_point() or value.is_complex()):
            followers[node] = frozenset([node])
        effect = effects.by_position.get(position)
        pure = effect is None or not (effect.observable or effect.entangles)
        if node.op != "call_function" or not pure or position in inside or depends_on_branch(node):
            continue
        if all(operand in followers for operand in node.all_input_nodes):
            followers[node] = frozenset().union(*(followers[operand] for operand in node.all_input_nodes))
    return followers


def _cheaper_to_repeat(
    whole: GraphModule, followers: _Followers, assignment: Mapping[str, int], stage: int
) -> Iterator[Node]:
    """What ``stage`` would be sent, and has more bytes than those inputs that it would need instead."""
    returned = {node for output in whole.graph.find_nodes(op="output") for node in output.all_input_nodes}
    used = dict.fromkeys(
        operand
        for node in whole.graph.nodes
        if assignment.get(node.name) == stage
        for operand in node.all_input_nodes
    )
    inputs = {node for node in used if node.op == "placeholder"}
    sent = [
        node
        for node in used
        if node in followers and assignment.get(node.name, stage) != stage and node not in returned
    ]
    for node in sorted(
        (node for node in sent if isinstance(metadata(node), Tensor)), key=_bytes, reverse=True
    ):
        more = followers[node] - inputs
        if _bytes(node) > sum(map(_bytes, more)):
            inputs |= more
            yield node


def _bytes(node: Node) -> int:
    value = metadata(node)
    return prod(size_at(size, int) for size in value.shape) * value.element_size()


def _copied(
    whole: GraphModule,
    assignment: dict[str, int],
    copies: dict[tuple[Node, int], Node],
    value: Node,
    stage: int,
) -> Node:
    """The copy of ``value`` in ``stage``, made with all that it follows from."""
    chain, waiting = {value}, [value]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand.name in assignment and isinstance(metadata(operand), Tensor) and operand not in chain:
                chain.add(operand)
                waiting.append(operand)
    for node in [node for node in whole.graph.nodes if node in chain and (node, stage) not in copies]:
        with whole.graph.inserting_after(node):
            copied = whole.graph.node_copy(node, partial(_own, copies, stage))
        copies[node, stage] = copied
        assignment[copied.name] = stage
    return copies[value, stage]


def _own(copies: Mapping[tuple[Node, int], Node], stage: int, node: Node) -> Node:
    return copies.get((node, stage), node)


def _erase_unused(
    whole: GraphModule, assignment: dict[str, int], followers: _Followers, replaced: list[Node]
) -> None:
    """Erase what nobody uses now that later stages have their own."""
    waiting = list(replaced)
    while waiting:
        node = waiting.pop()
        if node.users or node.op != "call_function" or node.name not in assignment or node not in followers:
            continue
        waiting += node.all_input_nodes
        whole.graph.erase_node(node)
        del assignment[node.name]
