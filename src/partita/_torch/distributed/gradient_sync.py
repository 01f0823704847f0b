"""When torch's data parallel wrappers reduce gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "converted_dtype",
    "converts_borders",
    "data_parallel_part",
    "expect_backward",
    "in_forward_of_ddp",
    "reduces",
    "replicated_in_place",
    "sharded_roots",
]


def expect_backward(module: DistributedDataParallel, outputs: Iterable[Tensor]) -> None:
    """Make ``module`` reduce all gradients in the next backward pass, though its forward pass ran under
    ``no_sync()``.

    Args:
        outputs: the roots of that backward pass; used only where unused parameters must be found.
    """
    search = module.find_unused_parameters and not module.static_graph
    module.reducer.prepare_for_backward(list(outputs) if search else [])


def sharded_roots(module: nn.Module) -> list[FSDPModule]:
    """The outermost modules, ``module`` itself or below, that ``fully_shard`` was applied to."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in sharded_roots(child)]


def replicated_in_place(modules: Iterable[nn.Module]) -> bool:
    """Whether torch's composable ``replicate``, which hides a `DistributedDataParallel` in hooks, was applied
    to any of ``modules``.
    """
    return any(map(_hides_ddp, modules))


def in_forward_of_ddp() -> bool:
    """Whether a forward pass of torch's `DistributedDataParallel`, which reduces gradients, is under way."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def data_parallel_part(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The first module, ``module`` itself or below, that reduces gradients by itself, with its name: torch's
    wrappers, ``fully_shard``, and what has the switch that `DistributedDataParallel` has for loops.
    """
    for name, inner in module.named_modules():
        wrapped = isinstance(inner, (DistributedDataParallel, FullyShardedDataParallel, FSDPModule))
        if wrapped or hasattr(type(inner), "require_backward_grad_sync") or _hides_ddp(inner):
            return name, inner
    return None


def _hides_ddp(module: nn.Module) -> bool:
    return "replicate" in vars(module).get(REGISTRY_KEY, ()) and not isinstance(module, FSDPModule)


def converted_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype that ``fully_shard`` converts parameters of ``module`` to for a pass, by its policy; None
    where it leaves them what they are.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            dtype = child._get_fsdp_state()._mp_policy.param_dtype
            if dtype is not None and any(
                parameter.is_floating_point() and parameter.dtype is not dtype
                for parameter in child.parameters()
            ):
                return dtype
    return None


def converts_borders(module: nn.Module) -> bool:
    """Whether ``fully_shard`` converts what goes into ``module`` or comes out of it, by its policy."""
    if not isinstance(module, FSDPModule):
        return False
    policy = module._get_fsdp_state()._mp_policy
    return policy.output_dtype is not None or bool(policy.cast_forward_inputs and policy.param_dtype)


def reduces(module: FSDPModule) -> bool:
    """Whether it is set to reduce gradients (``set_requires_gradient_sync``)."""
    for child in module.modules():  # type: ignore[attr-defined]
        if isinstance(child, FSDPModule):
            group = child._get_fsdp_state()._fsdp_param_group
            if group is not None:
                return bool(group.reduce_grads)
    return True
