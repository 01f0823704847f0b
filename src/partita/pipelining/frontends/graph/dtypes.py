"""Parameters that are converted after the cut: a graph has the dtypes of its trace.

::

    kind = hidden.dtype                                    to.dtype(..., float32), whatever the weights are
    return self.weight * hidden.float().norm().to(kind)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.fx import GraphModule, Node

from partita._torch.tensors.tensor_text import short_name
from partita.capture.tracing.module_paths import module_path
from partita.errors import SignatureMismatch

__all__ = ["check_dtypes", "parameter_dtypes"]


def parameter_dtypes(whole: GraphModule) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter of a captured graph, by name."""
    return {name: parameter.dtype for name, parameter in whole.named_parameters()}


def check_dtypes(
    whole: GraphModule, graphs: Iterator[GraphModule], cut_for: Mapping[str, torch.dtype]
) -> None:
    """Check that parameters have the dtypes that they were cut with, where the graphs depend on them.

    Args:
        whole: has the parameters.
        graphs: those of its modes.
        cut_for: what `parameter_dtypes` gave at the cut.

    Raises:
        SignatureMismatch: names a parameter, and an operation whose dtype is that of the trace.
    """
    for name, parameter in whole.named_parameters():
        before = cut_for.get(name, parameter.dtype)
        if parameter.dtype is before:
            continue
        fixed = next((node for graph in graphs for node in graph.graph.nodes if _has_dtype(node)), None)
        if fixed is None:
            return
        where = module_path(fixed)
        raise SignatureMismatch(
            f"{name!r} is {short_name(parameter.dtype)}, and was {short_name(before)} when the model was "
            f"cut: its graph has dtypes of the cut, as {fixed.name!r} of {where or 'the model'} has. Convert "
            'the model first and cut it then, or let frontend="modules" cut its own code'
        )


def _has_dtype(node: Node) -> bool:
    """Whether an operation is told a dtype of floating point numbers."""
    values = (*node.args, *node.kwargs.values())
    return any(isinstance(value, torch.dtype) and value.is_floating_point for value in values)
