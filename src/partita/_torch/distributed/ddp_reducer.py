"""What torch's own ``DistributedDataParallel`` says about its buckets, and the place where ``torch.compile``
looks for the optimizer of its graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.backends.distributed as torch_distributed_backend
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "FIRST_BUCKET_BYTES",
    "ReducerFacts",
    "active_reducer",
    "is_ignored",
    "replace_optimizer",
    "replaced_optimizer",
]

FIRST_BUCKET_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
"""The cap of DDP's first bucket where the user gives none."""


@dataclass(frozen=True)
class ReducerFacts:
    """The reducer whose forward pass is running.

    Attributes:
        parameters: those that it reduces, in the order of the module.
        caps_bytes: a bucket is closed at its cap; the last one holds for all others too.
        rebuilt: the buckets that it has now, by index of the parameter; None before the first backward pass.
    """

    parameters: tuple[torch.Tensor, ...]
    caps_bytes: tuple[int, ...]
    rebuilt: tuple[tuple[int, ...], ...] | None


def active_reducer() -> ReducerFacts | None:
    """Return the reducer of the DDP module whose ``forward`` runs; None outside of one."""
    module = DistributedDataParallel._get_active_ddp_module()
    if module is None:
        return None
    return ReducerFacts(tuple(module._module_parameters), tuple(_caps(module)), _rebuilt(module))


def _caps(module: Any) -> list[int]:
    config = getattr(module, "_bucket_config", None)
    if config is None:  # before torch 2.13 the module itself has them
        first = FIRST_BUCKET_BYTES if module.bucket_bytes_cap_default else module.bucket_bytes_cap
        return list(module.bucket_bytes_cap_list) or [first, module.bucket_bytes_cap]
    first = getattr(config, "first_bucket_bytes_cap", module.bucket_bytes_cap)
    return list(getattr(config, "per_bucket_bytes_caps", ())) or [first, module.bucket_bytes_cap]


def _rebuilt(module: Any) -> tuple[tuple[int, ...], ...] | None:
    text = module.logger._get_ddp_logging_data().strs_map.get("rebuilt_per_bucket_param_indices", "")
    buckets = tuple(tuple(map(int, bucket.split())) for bucket in text.split(","))
    return buckets if all(buckets) else None


def is_ignored(parameter: torch.Tensor) -> bool:
    """Whether DDP was told to leave a parameter alone."""
    return bool(getattr(parameter, "_ddp_ignored", False))


def replaced_optimizer() -> Any:
    """Return the class that ``torch.compile`` uses for graphs in the forward pass of a DDP module."""
    return torch_distributed_backend.DDPOptimizer


def replace_optimizer(optimizer: Any) -> None:
    """Let ``torch.compile`` use another class for graphs in the forward pass of a DDP module."""
    torch_distributed_backend.DDPOptimizer = optimizer  # type: ignore[misc]
