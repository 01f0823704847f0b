"""Dropout and in-place draws in graphs of AOTAutograd's, as eager mode computes them on a CPU.

A trace has an operator for dropout that eager mode uses on other devices only. It scales by a number that
was rounded otherwise, which shows in low precision, and in single precision for some rates (0.15). And it has
``x.bernoulli_(p)`` as a function that fills new memory in plain order, where eager mode fills ``x`` in the
order in which that lies: of a tensor with channels last, other elements are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

__all__ = ["calls_native_dropout", "draw_as_eager"]

_aten = torch.ops.aten
_NEW_MEMORY = ("aten::empty", "aten::new_empty")
"""What names of operators begin with whose result nobody has written to."""


def calls_native_dropout(gm: GraphModule) -> bool:
    """Whether a graph of Dynamo's, or one inside of it, asks for the other devices' dropout by name."""
    inside = (module for module in gm.modules() if isinstance(module, GraphModule))
    return any("native_dropout" in str(node.target) for module in inside for node in module.graph.nodes)


def draw_as_eager(gm: GraphModule) -> None:
    """Let a functional graph draw, in place, as its model does in eager mode."""
    for node in list(gm.graph.nodes):
        with gm.graph.inserting_before(node):
            if node.target is _aten.native_dropout.default and _is_of_cpu(node.args[0]):
                _replace_dropout(gm.graph, node, *node.args)
            elif node.target is _aten.native_dropout_backward.default and _is_of_cpu(node.args[0]):
                _replace_dropout_backward(gm.graph, node, *node.args)
            elif node.target is _aten.bernoulli.p and _is_new_memory(node.args[0]):
                node.target = _aten.bernoulli_.float
    gm.recompile()


def _replace_dropout(graph: Graph, node: Node, x: Any, rate: Any, *_: Any) -> None:
    if rate < 1:
        noise = graph.call_function(_aten.empty_like.default, (x,))
        noise = graph.call_function(_aten.bernoulli_.float, (noise, 1 - rate))
        noise = graph.call_function(_aten.div_.Scalar, (noise, 1 - rate))
    else:
        noise = graph.call_function(_aten.zeros_like.default, (x,))
    result = graph.call_function(_aten.mul.Tensor, (x, noise))
    mask = graph.call_function(_aten.ne.Scalar, (noise, 0))
    for user in list(node.users):
        part = mask if user.args[1] else result
        part.meta = dict(user.meta)
        user.replace_all_uses_with(part)
        graph.erase_node(user)
    graph.erase_node(node)


def _replace_dropout_backward(graph: Graph, node: Node, gradient: Any, mask: Any, scale: Any) -> None:
    noise = graph.call_function(_aten._to_copy.default, (mask,), {"dtype": gradient.meta["val"].dtype})
    noise.meta = dict(node.meta)
    if scale:
        noise = graph.call_function(_aten.div.Scalar, (noise, 1 / scale))
        noise.meta = dict(node.meta)
    result = graph.call_function(_aten.mul.Tensor, (gradient, noise))
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_of_cpu(value: Any) -> bool:
    example = value.meta["val"]
    return example.device.type == "cpu" and bool(example.is_floating_point())


def _is_new_memory(value: Any) -> bool:
    name = str(getattr(getattr(value, "target", None), "_schema", ""))
    return name.startswith(_NEW_MEMORY) and len(value.users) == 1
