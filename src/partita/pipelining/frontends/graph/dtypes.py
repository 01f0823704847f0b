"""Parameters that are converted after the cut, while the graph has the dtypes of its trace."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule

from partita._torch.tensors.tensor_text import short_name
from partita.errors import SignatureMismatch
from partita.pipelining.interface.fixed_dtypes import fixed_dtype
from partita.pipelining.interface.two_modes import graphs_in

__all__ = ["check_dtypes", "parameter_dtypes"]


def parameter_dtypes(whole: GraphModule) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter of a captured graph, by name."""
    return {name: parameter.dtype for name, parameter in whole.named_parameters()}


def check_dtypes(whole: GraphModule, cut_for: Mapping[str, torch.dtype]) -> None:
    """Check that parameters have the dtypes that they were cut with, where the graph depends on them.

    Args:
        whole: has the parameters.
        cut_for: what `parameter_dtypes` gave at the cut.

    Raises:
        SignatureMismatch: names a parameter, and an operation whose dtype is that of the trace.
    """
    for name, parameter in whole.named_parameters():
        before = cut_for.get(name, parameter.dtype)
        if parameter.dtype is before:
            continue
        fixed = fixed_dtype(graphs_in(whole))
        if not fixed:
            return
        raise SignatureMismatch(
            f"{name!r} is {short_name(parameter.dtype)}, and was {short_name(before)} when the model was "
            f"cut: its graph has dtypes of the cut, as {fixed} has. Convert the model first and cut it then, "
            'or let frontend="modules" cut its own code'
        )
