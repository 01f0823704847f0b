"""In which layout the gradients that arrive at a traced backward graph lie in memory.

AOTAutograd guesses that a gradient lies as the output does that it is of, and copies it into that layout
where it does not. Autograd takes it as it lies, and another layout has other last bits (a normalisation adds
up in another order)::

    conv ── batch_norm ── transpose ┊ ── linear       the gradient of the transposed output
                                    ┊                 arrives in plain order

So a graph that runs operator by operator takes its gradients as they lie, and the operators that need a
layout get their operands in the traced one, right before they run.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node

__all__ = ["lay_out_operands", "may_lie_anywhere", "take_gradients_as_they_lie"]

_BOUND_TO_STRIDES = ("as_strided", "view.dtype", "resize", "set_")
"""What names of operators begin with that read memory, and not elements."""

_LAID_OUT_BEFORE = frozenset(
    f"aten::{name}"
    for name in (
        "_cdist_backward",
        "_unsafe_index_put",
        "_weight_norm_interface_backward",
        "cudnn_batch_norm_backward",
        "miopen_batch_norm_backward",
        "native_group_norm_backward",
        "view_as_complex",
    )
)
"""Operators whose operands torch's formulas of derivatives lay out first (``grad.contiguous()``), and one
that stands for the backward pass of an interpolation, whose kernel does so.
"""


def may_lie_anywhere(joint: GraphModule) -> bool:
    """Whether every operand that has to lie as it was traced, and depends on a gradient that arrives, can be
    laid out so.
    """
    return all(_can_be_laid_out(operand) for _, operand in _bound_to_a_layout(joint))


def lay_out_operands(gm: GraphModule) -> None:
    """Lay out, in place, the operands of operators that need it.

    These are those that read memory by strides, those of a user, who may have asked for packed order before,
    and those that torch's formulas lay out: none of that leaves a trace where the traced operand is laid out
    so already.
    """
    for node, operand in _bound_to_a_layout(gm):
        with gm.graph.inserting_before(node):
            node.replace_input_with(operand, _laid_out(gm.graph, operand))
    for node in list(gm.graph.nodes):
        if getattr(getattr(node.target, "_schema", None), "name", "") not in _LAID_OUT_BEFORE:
            continue
        for operand in node.all_input_nodes:
            if _memory_format(operand.meta.get("val")) is not None:
                with gm.graph.inserting_before(node):
                    node.replace_input_with(operand, _laid_out(gm.graph, operand))
    gm.recompile()


def take_gradients_as_they_lie() -> None:
    """Let the graph that is being compiled take its gradients in the layout that they arrive in: AOTAutograd
    is told that all sizes and strides are the expected ones.
    """
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta  # for who compiles

    context = TracingContext.try_get()
    facts = None if context is None else context.fw_metadata
    for meta in () if facts is None else facts.subclass_tangent_meta:
        if isinstance(meta, PlainTensorMeta) and meta.memory_format is not None:
            meta.memory_format = MemoryFormatMeta(size=_ANY, stride=_ANY)


class _Any:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


_ANY: Any = _Any()


def _bound_to_a_layout(gm: GraphModule) -> list[tuple[Node, Node]]:
    """Nodes that take no other layout than the traced one, each with an operand that depends on a gradient
    that arrives.
    """
    follow: set[Node] = set()
    bound: list[tuple[Node, Node]] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder" and "tangents" in str(node.target):
            follow.add(node)
        elif node.op.startswith("call_"):
            operands = [operand for operand in node.all_input_nodes if operand in follow]
            if operands:
                follow.add(node)
            if not _takes_any_layout(node.target):
                bound += [(node, it) for it in operands if isinstance(it.meta.get("val"), torch.Tensor)]
    return bound


def _takes_any_layout(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    namespace, _, name = str(target).partition(".")
    return namespace == "prims" or (namespace == "aten" and not name.startswith(_BOUND_TO_STRIDES))


def _memory_format(value: Any) -> torch.memory_format | None:
    """The format in which a traced value is contiguous; None where it is in none, or is no tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    order: torch.memory_format = torch._prims_common.suggest_memory_format(value)
    return order if value.is_contiguous(memory_format=order) else None


def _dimensions_in_memory(value: torch.Tensor) -> Sequence[int] | None:
    """The dimensions of a traced value, outermost in memory first; None where it has gaps or overlaps, or
    strides that are no numbers.
    """
    if not all(type(number) is int for number in (*value.shape, *value.stride())):
        return None
    order = sorted(range(value.dim()), key=lambda at: (value.stride(at), value.shape[at]), reverse=True)
    return order if value.permute(order).is_contiguous() else None


def _can_be_laid_out(operand: Node) -> bool:
    value = operand.meta["val"]
    return _memory_format(value) is not None or _dimensions_in_memory(value) is not None


def _laid_out(graph: Graph, operand: Node) -> Node:
    """The operand in the layout that it was traced in: itself where it lies so."""
    value = operand.meta["val"]
    memory_format = _memory_format(value)
    aten = torch.ops.aten
    if memory_format is not None:
        result = graph.call_function(aten.contiguous.default, (operand,), {"memory_format": memory_format})
    else:
        order = _dimensions_in_memory(value)
        assert order is not None
        back = [order.index(at) for at in range(len(order))]
        outermost_first = graph.call_function(aten.permute.default, (operand, list(order)))
        outermost_first.meta = {**operand.meta, "val": value.permute(order)}
        packed = graph.call_function(aten.contiguous.default, (outermost_first,))
        packed.meta = dict(outermost_first.meta)
        result = graph.call_function(aten.permute.default, (packed, back))
    result.meta = dict(operand.meta)
    return result
