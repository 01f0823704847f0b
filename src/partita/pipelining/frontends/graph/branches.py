"""Branches on data in a graph that is cut: every stage evaluates the condition itself.

A value that is a mask in one branch and None in the other can't be sent. Each stage that uses it computes it
from tensors that can be sent::

    stage 0   condition ── mask ─┬─ sdpa           stage 0   condition ── mask ── sdpa
              ───────────────────┼───────    -->            ──────────── all, padding (tensors) ────
    stage 1                      └─ sdpa           stage 1   condition ── mask ── sdpa

What gradients flow through is computed once, where the model computes it, so that they are summed in the
model's order. It is sent in each branch: where it is not computed, a stage sends zeros, which nothing reads.
So is what one branch writes to memory that all branches have, such as a buffer: nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from partita.graph.attributes import lookup
from partita.graph.effect_rules.conditions import (
    OnlyIf,
    choose,
    depends_on_branch,
    is_branch_function,
    reads_condition,
)
from partita.graph.effect_rules.node_effect import PURE
from partita.graph.effects import Effects, analyse, metadata
from partita.pipelining.frontends.graph.writes import written_apart

__all__ = ["branch_nodes", "repeat_branches", "trained_in_a_branch"]


def branch_nodes(whole: GraphModule) -> Iterator[Node]:
    """The nodes whose values can't be sent, because a branch on data decides what they are."""
    depending = [node for node in whole.graph.nodes if node.op == "call_function" and depends_on_branch(node)]
    once = _computed_once(whole, _trained(whole)) if depending else ()
    return (node for node in depending if node not in once)


def repeat_branches(whole: GraphModule, assignment: dict[str, int]) -> None:
    """Give each stage its own copies of the branch nodes that it uses, in place.

    Args:
        assignment: the stage of each node that computes; it is changed, and the copies are added.

    Raises:
        CaptureError: memory of one branch is written where a stage has it twice, or not at all.
    """
    nodes = list(branch_nodes(whole))
    if not nodes:
        return
    branching = set(nodes)
    effects = analyse(whole)
    # From the last node on: which stages use each node, directly or through other branch nodes; and which use
    # the memory that it may write to, so that a write is made wherever it is read.
    wanted: dict[Node, dict[int, list[Node]]] = {}
    used_by: dict[int, set[int]] = {}
    for position, node in reversed([*enumerate(effects.nodes)]):
        if node not in branching:
            if node.name in assignment:
                for storage in effects.storages_of(node.all_input_nodes):
                    used_by.setdefault(storage, set()).add(assignment[node.name])
            continue
        users: dict[int, list[Node]] = {}
        for user in node.users:
            for stage in wanted[user] if user in branching else (assignment.get(user.name),):
                if stage is not None:
                    users.setdefault(stage, []).append(user)
        for storage in effects.storages_written(effects.by_position.get(position, PURE)):
            for stage in used_by.get(storage, ()):
                users.setdefault(stage, [])
        wanted[node] = users or {assignment[node.name]: []}  # nobody uses it: it stays where it is
        for storage in effects.storages_of(node.all_input_nodes):
            used_by.setdefault(storage, set()).update(wanted[node])
    _check_memory(whole, effects, wanted, assignment)
    # The first of these stages keeps the node itself, each other one gets a copy.
    copies: dict[tuple[Node, int], Node] = {}
    for node in nodes:
        stages = sorted(wanted[node])
        for stage in stages[1:]:
            with whole.graph.inserting_after(node):
                copied = whole.graph.node_copy(node, partial(_copy_in, copies, stage))
            copies[node, stage] = copied
            assignment[copied.name] = stage
            for user in wanted[node][stage]:
                if user not in branching:
                    user.replace_input_with(node, copied)
        assignment[node.name] = stages[0]
    for node in nodes:
        # the first stage of this node may be a later one of its operands
        for operand in node.all_input_nodes:
            if (operand, assignment[node.name]) in copies:
                node.replace_input_with(operand, copies[operand, assignment[node.name]])
    if copies:
        whole.graph.lint()
        whole.recompile()


def _check_memory(
    whole: GraphModule,
    effects: Effects,
    wanted: Mapping[Node, Collection[int]],
    assignment: Mapping[str, int],
) -> None:
    """Refuse writes to memory that each stage makes for itself, where a stage gets a value in it from an
    earlier one, too: a write reaches one of the two, or is made once more in what has been written already.
    """
    makers = _makers(effects, wanted)
    if not makers:
        return
    senders_to = _senders(effects, wanted, assignment)
    for position in effects.writers:
        writer = effects.nodes[position]
        own = {*wanted.get(writer, (assignment[writer.name],))}
        for operand in effects.by_position[position].writes:
            for storage in makers.keys() & effects.storages_of([operand]):
                for stage in own | makers[storage]:
                    senders = list(senders_to.get((storage, stage), {}).values())
                    twice = len(senders) + (stage in makers[storage]) > 1 or own.intersection(senders)
                    missed = writer not in wanted and stage > max(own)
                    if twice if stage in own else missed:
                        raise written_apart(whole, writer, operand, max(own), {*own, stage, *senders})


def _makers(effects: Effects, wanted: Mapping[Node, Collection[int]]) -> dict[int, set[int]]:
    """For each memory that branch nodes make, the stages that make it for themselves."""
    makers: dict[int, set[int]] = {}
    for node, stages in wanted.items():
        for storage in _fresh(effects, node):
            makers.setdefault(storage, set()).update(stages)
    return makers


def _senders(
    effects: Effects, wanted: Mapping[Node, Collection[int]], assignment: Mapping[str, int]
) -> dict[tuple[int, int], dict[Node, int]]:
    """By memory and the stage that receives: each value in it that is sent there, and by which stage."""
    senders: dict[tuple[int, int], dict[Node, int]] = {}
    for user in effects.nodes:
        for value in user.all_input_nodes:
            if value in wanted or value.name not in assignment:
                continue
            sender = assignment[value.name]
            receivers = wanted.get(user, (assignment.get(user.name, sender),))
            for stage in receivers:
                if stage > sender:
                    for storage in effects.storages_of([value]):
                        senders.setdefault((storage, stage), {})[value] = sender
    return senders


def _copy_in(copies: Mapping[tuple[Node, int], Node], stage: int, node: Node) -> Node:
    return copies.get((node, stage), node)


def trained_in_a_branch(whole: GraphModule, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that need no gradient in the branch of the example, or are not computed there, and may need
    one in another branch, or are computed beside such.

    Args:
        values: of the nodes, by name, in the branch of the example.
    """
    if not any(is_branch_function(node.target) for node in whole.graph.nodes):
        return {}
    trained = _trained(whole)
    once = _computed_once(whole, trained)
    of_branches: dict[str, Tensor] = {}
    beside: dict[str, Tensor] = {}
    for node in whole.graph.nodes:
        value = values.get(node.name)
        if value is None and node in once:
            value = metadata(node)
        if not isinstance(value, Tensor) or value.requires_grad:
            continue
        of_branch = node.target is choose or node in once
        if node in trained and (of_branch or any(item.name in of_branches for item in node.all_input_nodes)):
            of_branches[node.name] = value.detach().requires_grad_()
        elif node in once:
            beside[node.name] = value
    return of_branches | beside


def _computed_once(whole: GraphModule, trained: Collection[Node]) -> set[Node]:
    """The nodes of one branch that gradients may flow through, and all that is in the tuples among them; and
    those that write to memory of all branches.
    """
    once = _writing_for_all(whole)
    for node in whole.graph.nodes:
        if _is_of_one_branch(node):
            of_tuple = any(operand in once and _is_tuple(operand) for operand in node.all_input_nodes)
            if node in trained or of_tuple:
                once.add(node)
    return once


def _writing_for_all(whole: GraphModule) -> set[Node]:
    """The nodes of one branch that write to memory that is no branch's own."""
    effects = analyse(whole)
    own: set[int] = set()
    writing: set[Node] = set()
    for position, node in enumerate(effects.nodes):
        if not isinstance(node.target, OnlyIf):
            continue
        if not own.issuperset(effects.storages_written(effects.by_position.get(position, PURE))):
            writing.add(node)
        own |= _fresh(effects, node)
    return writing


def _fresh(effects: Effects, node: Node) -> set[int]:
    """The memory that a node makes."""
    return {*effects.storages_of([node])}.difference(effects.storages_of(node.all_input_nodes))


def _is_tuple(node: Node) -> bool:
    return isinstance(metadata(node), (tuple, list))


def _is_of_one_branch(node: Node) -> bool:
    """Whether a node computes tensors in one branch, and nothing in the other."""
    return isinstance(node.target, OnlyIf) and isinstance(metadata(node), (Tensor, tuple, list))


def _trained(whole: GraphModule) -> set[Node]:
    """The nodes through whose values a gradient may flow to a parameter or an input."""
    trained: set[Node] = set()
    for node in whole.graph.nodes:
        value = lookup(whole, node) if node.op == "get_attr" else metadata(node)
        if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
            continue
        if isinstance(value, nn.Parameter) or (node.op == "placeholder" and isinstance(value, Tensor)):
            is_trained = value.requires_grad
        else:
            is_trained = not trained.isdisjoint(node.all_input_nodes)
        if is_trained and not reads_condition(node):
            trained.add(node)
    return trained
