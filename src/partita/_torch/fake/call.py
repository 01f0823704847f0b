"""What a module would return, without running it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module

__all__ = ["fake_call"]


def fake_call(module: nn.Module, args: Sequence[Any]) -> Any:
    """Return the result of ``module.forward(*args)`` as fake tensors: shapes, dtypes and devices, under the
    grad mode and the autocast that hold here.

    Nothing is computed, hooks of the module itself do not run, and no parameter or buffer is read or written.

    Args:
        args: tensors are read for shape, dtype and device only.

    >>> fake_call(nn.Linear(2, 3), [torch.empty(5, 2)]).shape
    torch.Size([5, 3])
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_of: dict[int, Tensor] = {}
        fakes = {name: fake_of.setdefault(id(value), _like(value)) for name, value in _each_once(module)}
        inputs = [_like(value) if isinstance(value, Tensor) else value for value in args]
        with _reparametrize_module(module, fakes):
            return module.forward(*inputs)


def _each_once(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under one name for each place: torch would put the fake one back in a place that
    two names lead to, of a child that is registered twice.
    """
    for path, child in module.named_modules():
        yield from child.named_parameters(path, recurse=False, remove_duplicate=False)
        yield from child.named_buffers(path, recurse=False, remove_duplicate=False)


def _like(value: Tensor) -> Tensor:
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fake.requires_grad_(value.requires_grad)
