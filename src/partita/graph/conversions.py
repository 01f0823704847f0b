"""Conversions that change nothing, such as ``x.float()`` of float32: eager mode returns the tensor itself, of
which autograd sees one value, where the graph has two nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from partita.graph.effects import metadata

__all__ = ["returns_its_operand"]

_CONVERSIONS = frozenset(
    {
        *(torch.ops.aten.to.dtype, torch.ops.aten.to.device, torch.ops.aten.to.dtype_layout),
        *(torch.ops.aten.to.other, torch.ops.aten.type_as.default, torch.ops.aten.contiguous.default),
    }
)


def returns_its_operand(node: Node) -> bool:
    """Whether a node returned, on the example, the very tensor that it was called with."""
    if node.target not in _CONVERSIONS or True in (*node.args, *node.kwargs.values()):
        return False  # a copy was asked for
    after, before = metadata(node), metadata(node.all_input_nodes[0])
    return (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and (before.dtype, before.device, before.stride()) == (after.dtype, after.device, after.stride())
    )
