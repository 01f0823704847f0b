"""What a module returns for inputs of given shapes, found without running it on data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from partita._torch.compile.eager_stance import nothing_compiled
from partita._torch.containers.pytree import flatten, unflatten
from partita._torch.fake.ghosts import past_dispatch_modes
from partita._torch.modules.unsharded_copy import unsharded_copy
from partita._torch.modules.untouched import untouched

__all__ = ["run_on_fakes"]


def run_on_fakes(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[Any, list[bool]]:
    """Call a copy of ``module`` that shares nothing with it and whose tensors have no memory.

    Nothing is computed, and neither the module (its parameters, buffers, attributes of any kind) nor the
    state of the random generators changes. Its hooks run. Gradients are on. Dispatch modes that the caller is
    in, such as a ``FlopCounterMode``, see nothing of it.

    Args:
        args: tensors among them are read for shape, dtype and ``requires_grad`` only; they may be on the
            meta device.
        device: where the inputs are to lie.

    Returns:
        What the module returned, with fake tensors; and for each leaf of ``(args, kwargs)`` whether the
        module writes to it.

    Raises:
        ExecutionError: what the module calls reaches the module itself, and changes it.
        Exception: whatever the module raises; torch's own where only data could tell how to go on.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    ordinary = torch.inference_mode(False)  # whose tensors know how often they were written to
    with past_dispatch_modes(), ordinary, FakeCopyMode(mode):
        twin = unsharded_copy(module, mode)
    with past_dispatch_modes(), ordinary, untouched(module), nothing_compiled(), mode, torch.enable_grad():
        leaves, spec = flatten((args, dict(kwargs)))
        inputs = [_like(leaf, device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        versions = [_version(leaf) for leaf in inputs]
        positional, named = unflatten(inputs, spec)
        output = twin(*positional, **named)
        written = [_version(leaf) != version for leaf, version in zip(inputs, versions, strict=True)]
    return output, written


def _like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    strides = value.stride()
    fake = torch.empty_strided(
        value.shape, strides, dtype=value.dtype, device=device, requires_grad=value.requires_grad
    )
    return fake.clone()  # no leaf, so that it may be written to


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) else 0
