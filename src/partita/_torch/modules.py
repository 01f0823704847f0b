"""What a module holds beyond its documented iterators."""

from __future__ import annotations

import torch

__all__ = [
    "has_forward_hooks",
    "is_buffer",
    "is_guards_module",
    "is_persistent_buffer",
    "own_module",
    "owns_attribute",
]

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of ``module`` runs user code that its class does not show: a hook, or a ``forward`` set
    on the instance.
    """
    if any(getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS):
        return True
    return "forward" in vars(module) or any(getattr(module, name, None) for name in _HOOKS)


def is_buffer(module: torch.nn.Module, name: str) -> bool:
    """Whether ``module`` itself has a buffer called ``name``."""
    return name in module._buffers


def own_module(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """The child called ``name``, or None. A class attribute of that name is no child."""
    return module._modules.get(name)


def owns_attribute(module: torch.nn.Module, name: str) -> bool:
    """Whether ``module`` itself holds ``name``, and its class does not compute it (as a parametrised weight
    is computed).
    """
    holders = (module._parameters, module._buffers, module._modules, vars(module))
    return any(name in holder for holder in holders)


def is_persistent_buffer(module: torch.nn.Module, name: str) -> bool:
    """Whether the buffer called ``name`` of ``module`` itself belongs to its state dict."""
    return name in module._buffers and name not in module._non_persistent_buffers_set


def is_guards_module(module: torch.nn.Module) -> bool:
    """Whether ``module`` is the input check that ``ExportedProgram.module()`` puts at the head of its
    graph.
    """
    return type(module).__name__ == "GuardsFn" and type(module).__module__.startswith("torch.export")
