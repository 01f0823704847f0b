"""Parameters with other memory, and the hooks that see their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import getclosurevars
from typing import Any

import torch
from torch import nn
from torch.autograd import graph
from torch.utils.hooks import RemovableHandle

from partita._torch.tensors.subclasses import with_class_of
from partita.errors import NotSupported

__all__ = ["has_hooks", "joint_hooks", "parameter_like"]


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` has hooks that see its gradients."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def parameter_like(parameter: nn.Parameter, memory: torch.Tensor) -> nn.Parameter:
    """A parameter for the place of another one, with memory of its own, as ``nn.Module.to`` leaves it: of its
    class, with its attributes, a copy of its gradient, and the hooks on that for as long as they are
    registered there.

    Raises:
        NotSupported: a hook that waits for gradients of other tensors as well.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> handle = weight.register_hook(lambda gradient: 3 * gradient)
    >>> other = parameter_like(weight, torch.zeros(2))
    >>> other.sum().backward()
    >>> other.grad
    tensor([3., 3.])
    >>> handle.remove()
    >>> other.sum().backward()
    >>> other.grad
    tensor([4., 4.])
    """
    if next(joint_hooks(parameter), None) is not None:
        raise NotSupported(
            f"a parameter of shape {list(parameter.shape)} has a hook of register_multi_grad_hook(), which "
            "can't go along where the parameter is copied: register it behind that, with the copies"
        )
    result = with_class_of(parameter, nn.Parameter(memory, parameter.requires_grad))
    for name, value in vars(parameter).items():
        vars(result).setdefault(name, value)
    if parameter.grad is not None:
        result.grad = parameter.grad.to(result.device, copy=True)
    if has_hooks(parameter):
        result.requires_grad_()  # a frozen one takes no hooks, and keeps those that it has
        _add_hooks(result.register_hook, parameter._backward_hooks)
        _add_hooks(result.register_post_accumulate_grad_hook, parameter._post_accumulate_grad_hooks)
        result.requires_grad_(parameter.requires_grad)
    assert isinstance(result, nn.Parameter)
    return result


def joint_hooks(parameter: torch.Tensor) -> Iterator[int]:
    """For each hook of ``register_multi_grad_hook`` on ``parameter``: a number that all tensors have that it
    was registered with.
    """
    for hook in (parameter._backward_hooks or {}).values():
        code = getattr(hook, "__code__", None)
        if code is not None and code.co_filename == graph.__file__:
            # its lock: one for each time that it was registered
            yield id(getclosurevars(hook).nonlocals["lock"])


def _add_hooks(register: Callable[[Any], RemovableHandle], table: dict[int, Any] | None) -> None:
    if table:
        for key, hook in table.items():
            register(partial(_while_registered, table, key, hook))


def _while_registered(table: dict[int, Any], key: int, hook: Callable[[Any], Any], value: Any) -> Any:
    """What ``hook`` makes of ``value``, unless it was removed from the table, which the handles know as long
    as it is there: it outlives its parameter here.
    """
    return hook(value) if key in table else None
