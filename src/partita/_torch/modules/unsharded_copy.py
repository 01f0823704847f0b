"""Copies of modules that ``fully_shard`` has taken over, which torch itself refuses to copy.

A copy is what the module was before: whole parameters, an ordinary class, no hooks that gather. What the
mixed precision policy does to dtypes is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from partita._torch.modules.closure_copy import with_closures
from partita.errors import NotSupported

__all__ = ["unsharded_copy"]


def unsharded_copy(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """``copy.deepcopy(module)``, also where ``fully_shard`` was applied to it or to modules below; functions
    among the attributes that refer to modules refer to the copies.

    Args:
        mode: parameters that are sharded become fake tensors of it, of the size of the whole.

    Raises:
        NotSupported: parameters that were distributed before they were sharded.
    """
    sharded = [child for child in module.modules() if isinstance(child, FSDPModule)]
    with with_closures() as memo:
        for child in sharded:
            memo[id(child)] = object.__new__(type(child).__mro__[child._orig_cls_mro_index])
            memo |= _whole_parameters(child, mode)
        for child in sharded:
            content = {name: _without_gathering(name, value) for name, value in vars(child).items()}
            for key in (STATE_KEY, REGISTRY_KEY):
                content.pop(key, None)
            content["_compiled_call_impl"] = None  # as in any copy: that of `compile()` calls the original
            vars(memo[id(child)]).update(copy.deepcopy(content, memo))
            _cast_like(child, memo[id(child)])
        return copy.deepcopy(module, memo)


def _groups(module: FSDPModule) -> Iterator[Any]:
    """Yield the groups of parameters that are gathered together; torch 2.11 has one at most."""
    state = module._get_fsdp_state()
    one = () if hasattr(state, "_fsdp_param_groups") else (state._fsdp_param_group,)
    return filter(None, getattr(state, "_fsdp_param_groups", one))


def _whole_parameters(module: FSDPModule, mode: FakeTensorMode) -> dict[int, nn.Parameter]:
    """Return each parameter as it is in a forward pass, by the ``id`` of the sharded one."""
    whole = {}
    dtype = module._get_fsdp_state()._mp_policy.param_dtype
    for parameter in (parameter for group in _groups(module) for parameter in group.fsdp_params):
        if parameter.is_dtensor:
            raise NotSupported("tensor parallel parameters under fully_shard can't be made whole")
        info = parameter._module_info
        current = getattr(info.module, info.param_name)
        gathered = dtype if dtype is not None and current.is_floating_point() else current.dtype
        with mode:
            data = torch.empty(current.shape, dtype=gathered, device=current.device)
            whole[id(current)] = nn.Parameter(data, requires_grad=current.requires_grad)
    return whole


def _without_gathering(name: str, value: Any) -> Any:
    """Return an attribute's value; a table of hooks without those that ``fully_shard`` has registered."""
    if not name.endswith("_hooks") or not isinstance(value, dict):
        return value
    kept = {
        number: hook
        for number, hook in value.items()
        if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
    }
    return type(value)(kept)


def _cast_like(module: FSDPModule, twin: nn.Module) -> None:
    """Let the copy convert what comes in and goes out as the policy says."""
    policy = module._get_fsdp_state()._mp_policy
    if policy.cast_forward_inputs and policy.param_dtype:
        twin.register_forward_pre_hook(
            lambda _, args, kwargs: _cast(policy.param_dtype, (args, kwargs)), prepend=True, with_kwargs=True
        )
    if policy.output_dtype is not None:
        twin.register_forward_hook(lambda _, __, output: _cast(policy.output_dtype, output))


def _cast(dtype: torch.dtype, tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, partial(_cast_one, dtype), tree)


def _cast_one(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
