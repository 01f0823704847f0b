"""Operators that compute several gradients and can be asked for some of them, by an ``output_mask``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import Node

__all__ = ["ask_for_results", "has_output_mask", "operator_name"]

_MASK = "output_mask"
_NEVER_IN_PART = (
    "aten::native_group_norm_backward",  # for weights alone it may crash the process (2.13, channels-last)
    "aten::native_batch_norm_backward",  # takes as long for the input as for all
    "aten::batch_norm_backward",  # likewise
)


def operator_name(node: Node) -> str:
    """The name of the operator that a node calls, such as ``aten::mm``; empty where it calls none."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)


def has_output_mask(node: Node) -> bool:
    """Whether a node can be asked for some of its results."""
    name = operator_name(node)
    return bool(name) and name not in _NEVER_IN_PART and _MASK in _arguments(node)


def ask_for_results(node: Node, results: Collection[int]) -> None:
    """Let a node, in place, compute only these of the results that it computes now."""
    position = _arguments(node).index(_MASK)
    mask: Any = node.args[position] if position < len(node.args) else node.kwargs[_MASK]
    asked = [bool(wanted) and number in results for number, wanted in enumerate(mask)]
    if position < len(node.args):
        node.update_arg(position, asked)
    else:
        node.update_kwarg(_MASK, asked)
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        node.meta["val"] = tuple(one if wanted else None for one, wanted in zip(value, asked, strict=True))


def _arguments(node: Node) -> list[str]:
    target: Any = node.target
    return [argument.name for argument in target._schema.arguments]
