"""What a gradient scaler has found out about an optimizer's gradients."""

from __future__ import annotations

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

__all__ = ["found_inf", "set_found_inf"]


def found_inf(scaler: torch.amp.GradScaler, optimizer: Optimizer | None) -> bool:
    """Whether ``scaler.unscale_`` has met a non-finite gradient of this optimizer. Waits for the device."""
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(value.item() != 0 for value in flags.values())


def set_found_inf(scaler: torch.amp.GradScaler, optimizer: Optimizer | None, is_inf: bool) -> None:
    """Overrule the scaler: whether it skips this optimizer's step and lowers its next scale.

    Args:
        optimizer: None, or one without any gradient, gets a record of its own.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = OptState.UNSCALED
    flags = state["found_inf_per_device"]
    assert scaler._scale is not None
    if not flags:
        flags[scaler._scale.device] = torch.zeros((), dtype=torch.float32, device=scaler._scale.device)
    for value in flags.values():
        value.fill_(float(is_inf))
