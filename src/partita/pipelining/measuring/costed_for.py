"""What costs that are worked out for a device say of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from partita._torch.operators.roofline import Speeds
from partita._torch.tensors.tensor_text import short_name
from partita.planning import CostedFor

__all__ = ["costed_for", "most_common_dtype"]


def costed_for(parameters: Iterable[nn.Parameter], device: Speeds) -> CostedFor:
    """The device, and how fast it is with the dtype of most parameters; float32 where there are none."""
    dtype = most_common_dtype(parameters) or "float32"
    return CostedFor(getattr(device, "name", type(device).__name__), dtype, device.flops(dtype))


def most_common_dtype(parameters: Iterable[nn.Parameter]) -> str | None:
    """The dtype of most numbers in parameters, such as ``bfloat16``; None where there are no parameters."""
    sizes = Counter[torch.dtype]()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.numel()
    return next((short_name(dtype) for dtype, _ in sizes.most_common(1)), None)
