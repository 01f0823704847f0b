"""Autocast around a call. Most models make the same calls of torch under it; some ask for a dtype first::

    kind = hidden.dtype                    bfloat16 under autocast, float32 without
    hidden = hidden.float()
    ...
    return self.weight * hidden.to(kind)

A graph has the dtypes of its trace, whatever it is called under.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule

from partita.capture.merging.modes import add_check
from partita.capture.proving.forward_difference import forward_difference
from partita.capture.proving.samples import Sample
from partita.errors import CaptureError
from partita.verification.comparing.compare import Tolerance

__all__ = ["Autocast", "current_autocast", "keep_to_autocast", "require_autocast"]


@dataclass(frozen=True, slots=True)
class Autocast:
    """A kind of autocast: the type of device, and the dtype."""

    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"autocast({self.device!r}, {self.dtype})"


def current_autocast(device: str) -> Autocast | None:
    """The autocast that is active for a type of device.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     print(current_autocast("cpu"))
    autocast('cpu', torch.bfloat16)
    """
    if not torch.is_autocast_enabled(device):
        return None
    return Autocast(device, torch.get_autocast_dtype(device))


def keep_to_autocast(
    model: nn.Module, graph: GraphModule, sample: Sample, devices: Collection[str], tolerance: Tolerance
) -> None:
    """Compare a graph with its model under the other autocast: with it, where none is active now, and
    without, where one is. Where they differ, let the graph, in place, refuse to run under another than now.

    Args:
        devices: the types of device that the model's tensors are on.
        tolerance: within which the two are equal on the sample now.
    """
    for device in devices:
        now = current_autocast(device)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, dtype, enabled=now is None, cache_enabled=False):
            difference = forward_difference(model, graph, sample, tolerance)
        if difference:
            _refuse_others(type(model).__name__, graph, device, now, difference)


def _refuse_others(name: str, graph: GraphModule, device: str, now: Autocast | None, difference: str) -> None:
    has = "without autocast" if now is None else f"under {now}"
    text = (
        f"{name} asks for dtypes that autocast changes, and was cut {has}, where they are other ones "
        f"({difference.splitlines()[0]}): cut it under the autocast that it runs under, as in `with "
        f'torch.autocast({device!r}, ...): pipe = pipeline(...)`, or frontend="modules" cuts its own code, '
        "which asks for itself"
    )
    add_check(graph, require_autocast, device, None if now is None else now.dtype, text)


def require_autocast(device: str, dtype: torch.dtype | None, text: str) -> None:
    """Refuse to run under another autocast than this one, None for none.

    Raises:
        CaptureError: with that text.
    """
    now = current_autocast(device)
    if (None if now is None else now.dtype) is not dtype:
        raise CaptureError(text)
