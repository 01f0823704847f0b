"""What is said of a tensor that is trained, is no parameter, and is used by several stages."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["shares_of"]


def shares_of(what: str, stages: Sequence[int]) -> str:
    """Return the message about a leaf of autograd that stages can't share."""
    return (
        f"{what} requires gradients, is no parameter of the model, and stages {min(stages)} and "
        f"{max(stages)} use it: each would get only its own share of the gradient. Register it as a "
        "parameter of the model (torch.nn.Parameter as an attribute, or in a torch.nn.ParameterList or "
        "ModuleList), whose shares are summed, or cut so that one stage has all of its uses"
    )
