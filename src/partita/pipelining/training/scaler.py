"""Loss scaling for half precision, with one scale for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Optimizer

from partita._torch.autograd.grad_scaler import found_inf, set_found_inf
from partita.errors import ExecutionError
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.pipelining.training.needs_schedule import check_schedule
from partita.runtime.failures.thread_activity import doing
from partita.runtime.one_at_a_time import one_at_a_time
from partita.runtime.publish_errors import publish_errors
from partita.runtime.same_settings import check_same

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a pipeline: an overflow on one rank skips the step on all ranks.

    Torch's own looks at this rank's gradients alone, so other ranks would make a step that this one skips,
    and their scales would differ. Here `unscale_` shares overflows among all ranks. Making a scaler is
    collective, and from then on the schedule multiplies its losses' gradients by the scale: there is no
    ``scale(loss)`` to call. The rest is used as torch's is::

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
        init_scale: the first scale.
        growth_factor: what the scale is multiplied by to grow.
        growth_interval: after how many steps without overflow it grows.
        backoff_factor: what it is multiplied by after an overflow.
        enabled: False: do nothing at all.

    Raises:
        SignatureMismatch: the ranks made it with different arguments.
        ArgumentError: ``schedule`` is something else, such as a stage.
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
        check_schedule(schedule, "GradScaler")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._schedule = schedule  # whose comm is closed when nobody has the schedule
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
                schedule.comm, {f"the gradient scaler's {name}": repr(it) for name, it in settings.items()}
            )
        if self.is_enabled():
            schedule.loss_scale = self.get_scale

    def unscale_(self, optimizer: Optimizer | None) -> None:
        """Divide the gradients by the scale, and tell all ranks whether any is not finite. Collective.

        Raises:
            ExecutionError: ranks that don't call this in the same order.
            RuntimeError: called twice for one optimizer since `update`.
        """
        if not self.is_enabled():
            return
        self.scale(torch.ones(()))  # torch makes its scale at the first call; not every rank has a loss
        what = "unscaling gradients"
        comm = self._schedule.comm
        with one_at_a_time(comm, what), publish_errors(comm, what):
            overflow = False
            if optimizer is not None:
                with _own_parts(optimizer) as meshes:
                    super().unscale_(optimizer)
                overflow = found_inf(self, optimizer)
                for mesh in meshes:
                    overflow = _on_any(mesh, overflow)
            mine = (len(self._unscaled), overflow)
            counts = comm.all_gather_object(mine)
            if {number for number, _ in counts} != {mine[0]}:
                raise ExecutionError(
                    f"rank {comm.rank} unscales its optimizer number {mine[0]} since update(), but the "
                    f"ranks say {[number for number, _ in counts]}: call unscale_(), step() and update() in "
                    "the same order on every rank, with None for a rank that has no optimizer"
                )
        set_found_inf(self, optimizer, any(overflow for _, overflow in counts))
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """Call ``optimizer.step()`` unless a gradient on any rank is not finite. Collective."""
        if self.is_enabled() and id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        return None if optimizer is None else super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the next step's scale, which is the same on all ranks."""
        super().update(new_scale)
        self._unscaled.clear()


@contextmanager
def _own_parts(optimizer: Optimizer) -> Iterator[list[DeviceMesh]]:
    """Let the optimizer have this rank's parts of its sharded gradients for this block: torch computes with
    sharded tensors and others at once only where all are of one kind, as they are not where some of a
    stage's layers are tensor parallel.

    Yields:
        The meshes that gradients are sharded over, on all ranks of a mesh in the same order.
    """
    groups = optimizer.param_groups
    gradients = [it.grad for group in groups for it in group["params"] if isinstance(it.grad, DTensor)]
    if gradients:
        optimizer.param_groups = [{"params": [_own_part(it) for it in group["params"]]} for group in groups]
    try:
        yield list(dict.fromkeys(gradient.device_mesh for gradient in gradients))
    finally:
        optimizer.param_groups = groups


def _own_part(parameter: Tensor) -> Tensor:
    """What stands for a parameter where only gradients matter: a tensor with this rank's part of its own."""
    if not isinstance(parameter.grad, DTensor):
        return parameter
    gradient = parameter.grad.to_local()
    own = torch.empty_like(gradient)
    own.grad = gradient
    return own


def _on_any(mesh: DeviceMesh, flag: bool) -> bool:
    """Whether a flag is set on any rank of the mesh. Collective over the mesh."""
    mine = torch.full((), float(flag), device=mesh.device_type)
    everywhere = DTensor.from_local(mine, mesh, [Partial("max")] * mesh.ndim, run_check=False)
    return bool(everywhere.full_tensor().item())
