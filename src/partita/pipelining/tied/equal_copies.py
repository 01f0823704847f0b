"""The check that the copies of a tied parameter are still equal, as one parameter is to itself.

They get one gradient, and are equal as long as their optimizers do the same with it. A few bits of each copy
travel with the gradients (see ``partita.runtime.weight_sample``).
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from partita.errors import ExecutionError
from partita.pipelining.interface.routes import Tied
from partita.runtime.weight_sample import WeightSample

__all__ = ["local_tensor", "other_values", "sample_of"]


def sample_of(copy: Tensor, step: int) -> Tensor:
    """A sample of a copy in a step: `SAMPLE_FLAGS` numbers, 0 or 1, on its device."""
    return WeightSample([local_tensor(copy.detach())]).flags(step).to(copy.device)


def local_tensor(tensor: Tensor) -> Tensor:
    """The local shard of a sharded tensor; the other ranks with a copy have the same shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def other_values(group: Tied) -> ExecutionError:
    """The error for copies that differ."""
    return ExecutionError(
        f"the copies of the tied parameter {group.names[0]!r} in stages {list(group.stages)} have drifted "
        "apart: they get one gradient, and ranks did different things with it, or with the values. Give them "
        "one learning rate and one weight decay, clip with partita.pipelining.clip_grad_norm_ (the norm of a "
        "rank's own gradients is not the model's), load or initialise all copies alike, and start again from "
        "values that are equal"
    )
