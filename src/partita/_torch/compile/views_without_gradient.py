"""Views taken under ``no_grad`` that a compiled graph returns.

Such a view of what is trained requires a gradient, as that does, and in eager mode nothing gets it.
AOTAutograd makes a result that is a view of another one, or of an input, anew from that one when the graph
has run, with gradients on: what comes to the view would go on to what it is of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from partita._torch.autograd.running_pass import takes_gradient

__all__ = ["keep_from_gradient", "results_without_gradient"]


def results_without_gradient(gm: GraphModule) -> tuple[int, ...]:
    """Which results of a graph of Dynamo's are such views, or views of such ones."""
    if not gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled):
        return ()
    views: set[Node] = set()
    is_enabled = True
    for node in gm.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            is_enabled = node.args[0]
        elif _is_unlinked(node, is_enabled, views):
            views.add(node)
    results: Any = gm.graph.output_node().args[0]
    return tuple(number for number, one in enumerate(results) if one in views)


def _is_unlinked(node: Node, is_enabled: bool, views: set[Node]) -> bool:
    value = node.meta.get("example_value")
    if isinstance(node.target, HigherOrderOperator) or not node.op.startswith("call_"):
        return False
    if not isinstance(value, torch.Tensor) or not value.requires_grad or not value._is_view():
        return False
    if value.grad_fn is None:
        return not is_enabled and not takes_gradient(value)
    edges = value.grad_fn.next_functions
    return not views.isdisjoint(node.all_input_nodes) and all(function is None for function, _ in edges)


def keep_from_gradient(run: Callable[..., Any], numbers: Sequence[int]) -> Callable[..., Any]:
    """``run`` with these of its results as eager mode has them; itself where there are none."""
    if not numbers:
        return run

    def apart(*args: Any) -> list[Any]:
        results = list(run(*args))
        with torch.no_grad():
            for number in numbers:
                results[number] = results[number].view_as(results[number])
        return results

    return apart
