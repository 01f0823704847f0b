"""Operations of a graph that have a dtype of its trace, whatever dtypes they are run with::

kind = hidden.dtype                                    to.dtype(..., float32), whatever the weights are
return self.weight * hidden.float().norm().to(kind)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from partita.capture.tracing.module_paths import module_path

__all__ = ["fixed_dtype"]


def fixed_dtype(graphs: Iterable[GraphModule]) -> str:
    """Name an operation that is told a dtype of floating point numbers, and its module; empty: none is."""
    for graph in graphs:
        for node in graph.graph.nodes:
            if _has_dtype(node):
                return f"{node.name!r} of {module_path(node) or 'the model'}"
    return ""


def _has_dtype(node: Node) -> bool:
    values = (*node.args, *node.kwargs.values())
    return any(isinstance(value, torch.dtype) and value.is_floating_point for value in values)
