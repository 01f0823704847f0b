"""Loss scaling for half precision that all ranks agree on."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from partita._torch.autograd.grad_scaler import found_inf, set_found_inf
from partita.errors import ExecutionError
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.runtime.publish_errors import publish_errors
from partita.runtime.same_settings import check_same
from partita.runtime.whereabouts import doing

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a pipeline: one rank's overflow skips the step on all of them.

    Torch's own looks at this rank's gradients alone, so that the other stages would take a step which this
    one does not, and the scales would part. Here `unscale_` tells all ranks. Making one is collective, and
    from then on the schedule multiplies its losses' gradients with the scale: there is no ``scale(loss)`` to
    call. The rest is used as torch's is::

        scaler = GradScaler(schedule)
        with torch.autocast("cuda", torch.float16):
            schedule.step(x, target=y)
        scaler.unscale_(optimizer)  # only where gradients are looked at or clipped
        clip_grad_norm_(schedule, 1.0)
        scaler.step(optimizer)
        scaler.update()

    `unscale_` and `step` are collective: every rank calls them equally often, with None for the optimizer
    where it trains nothing.

    Args:
        schedule: whose losses are scaled.
        device: type of the device that the gradients are on.
        init_scale: what to multiply with at first.
        growth_factor: by how much the scale grows.
        growth_interval: after so many steps without overflow.
        backoff_factor: by how much it shrinks after an overflow.
        enabled: False: do nothing at all.

    Raises:
        SignatureMismatch: the ranks made it with different arguments.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        device: str = "cuda",
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        backoff_factor: float = 0.5,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._comm = schedule.comm
        self._unscaled: set[int] = set()
        settings = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "enabled": self.is_enabled(),
        }
        with doing("making a gradient scaler"):
            check_same(
                self._comm, {f"the gradient scaler's {name}": repr(it) for name, it in settings.items()}
            )
        if self.is_enabled():
            schedule.loss_scale = self.get_scale

    def unscale_(self, optimizer: Optimizer | None) -> None:
        """Divide the gradients by the scale, and let all ranks know of any that is not finite. Collective.

        Raises:
            ExecutionError: ranks that don't call this in the same order.
            RuntimeError: called twice for one optimizer since `update`.
        """
        if not self.is_enabled():
            return
        self.scale(torch.ones(()))  # torch makes its scale at the first call; not every rank has a loss
        with publish_errors(self._comm, "unscaling gradients"):
            if optimizer is not None:
                super().unscale_(optimizer)
            mine = (len(self._unscaled), optimizer is not None and found_inf(self, optimizer))
            said = self._comm.all_gather_object(mine)
            if {number for number, _ in said} != {mine[0]}:
                raise ExecutionError(
                    f"rank {self._comm.rank} unscales its optimizer number {mine[0]} since update(), but the "
                    f"ranks say {[number for number, _ in said]}: call unscale_(), step() and update() in "
                    "the same order on every rank, with None for a rank that has no optimizer"
                )
        set_found_inf(self, optimizer, any(found for _, found in said))
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step()``, unless any rank has met a gradient that is not finite. Collective."""
        if self.is_enabled() and id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        return None if optimizer is None else super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """The next step's scale; all ranks get the same, since all know of the same overflows."""
        super().update(new_scale)
        self._unscaled.clear()
