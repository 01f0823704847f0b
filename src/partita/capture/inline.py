"""Region wrappers back into the graph: what export folds into a nested graph is laid out again, so that it can be cut.

``torch.export`` turns ``with torch.no_grad():`` into one node that calls a nested graph. A cut can't go through it, and a model
whose rotary embedding is computed under ``no_grad`` has many. Here each becomes::

    previous = torch.is_grad_enabled()
    _set_grad_enabled(False)
    ... the nested graph's nodes ...
    _set_grad_enabled(previous)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.export import WRAP_AUTOCAST, WRAP_SET_GRAD
from partita._torch.fx import append_copy, map_arguments
from partita._torch.regions import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD
from partita.graph.state import lookup

__all__ = ["inline_regions"]


def inline_regions(gm: GraphModule) -> int:
    """Lay out every region wrapper of ``gm``, nested ones too, in place. Returns how many there were."""
    count = 0
    while wrappers := [node for node in gm.graph.nodes if node.target in (WRAP_SET_GRAD, WRAP_AUTOCAST)]:
        for node in wrappers:
            _inline(gm, node)
        count += len(wrappers)
    if count:
        gm.graph.lint()
        gm.recompile()
    return count


def _inline(gm: GraphModule, node: Node) -> None:
    grad = node.target is WRAP_SET_GRAD
    settings, body_node, operands = (node.args[:1], node.args[1], node.args[2:]) if grad else (
        node.args[:4], node.args[4], node.args[5:]
    )  # fmt: skip
    assert isinstance(body_node, Node)
    body = lookup(gm, body_node)
    graph = gm.graph
    with graph.inserting_before(node):
        if grad:
            previous = graph.call_function(torch.is_grad_enabled)
            graph.call_function(SET_GRAD, settings)
        else:
            entered = graph.call_function(ENTER_AUTOCAST, settings)
        results = _lay_out(gm, body, body_node, operands)
        if grad:
            graph.call_function(SET_GRAD, (previous,))
        else:
            graph.call_function(EXIT_AUTOCAST, (entered,))
    _hand_on(node, results)
    graph.erase_node(node)
    if not body_node.users:
        graph.erase_node(body_node)


def _lay_out(gm: GraphModule, body: GraphModule, body_node: Node, operands: Any) -> Any:
    """Copy the nodes of ``body`` to the insert point; its own attributes are reached through the wrapper's name."""
    environment: dict[Node, Any] = {}
    given = iter(operands)
    results: Any = None
    for inner in body.graph.nodes:
        if inner.op == "placeholder":
            environment[inner] = next(given)
        elif inner.op == "output":
            results = map_arguments(inner.args[0], environment.__getitem__)
        else:
            copy = append_copy(
                gm.graph,
                inner,
                map_arguments(inner.args, environment.__getitem__),
                map_arguments(inner.kwargs, environment.__getitem__),
            )
            if inner.op in ("get_attr", "call_module"):
                copy.target = f"{body_node.target}.{inner.target}"
            environment[inner] = copy
    return results


def _hand_on(node: Node, results: Any) -> None:
    """Give each user of the wrapper the laid-out value in place of ``wrapper[i]``."""
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
        return
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            user.graph.erase_node(user)
    if node.users:
        raise AssertionError(f"{node.name} is used as a whole by {list(node.users)}; export never writes that")
