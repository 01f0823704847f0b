"""What a module holds beyond its documented iterators."""

from __future__ import annotations

import torch

__all__ = ["has_forward_hooks", "is_guards_module", "is_persistent_buffer"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of ``module`` runs user hooks, whose effects nobody declares."""
    return any(getattr(module, name, None) for name in _HOOKS)


def is_persistent_buffer(module: torch.nn.Module, name: str) -> bool:
    """Whether the buffer called ``name`` of ``module`` itself belongs to its state dict."""
    return name in module._buffers and name not in module._non_persistent_buffers_set


def is_guards_module(module: torch.nn.Module) -> bool:
    """Whether ``module`` is the input check that ``ExportedProgram.module()`` puts at the head of its graph."""
    return type(module).__name__ == "GuardsFn" and type(module).__module__.startswith("torch.export")
