"""What a gradient scaler has found out about an optimizer's gradients."""

from __future__ import annotations

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

__all__ = ["found_inf", "set_found_inf"]


def found_inf(scaler: torch.amp.GradScaler, optimizer: Optimizer | None) -> bool:
    """Whether ``scaler.unscale_`` has met a gradient of this optimizer that is not finite. Waits for the
    device.
    """
    known = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(value.item() != 0 for value in known.values())


def set_found_inf(scaler: torch.amp.GradScaler, optimizer: Optimizer | None, found: bool) -> None:
    """Overrule what the scaler has found: it skips this optimizer's step, or not, and its next scale follows.

    Args:
        optimizer: None, or one without any gradient, gets a record of its own.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = OptState.UNSCALED
    known = state["found_inf_per_device"]
    assert scaler._scale is not None
    if not known:
        known[scaler._scale.device] = torch.zeros((), dtype=torch.float32, device=scaler._scale.device)
    for value in known.values():
        value.fill_(float(found))
