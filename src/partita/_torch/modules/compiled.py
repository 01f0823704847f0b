"""Compiled modules, and how to compile another module in the same way.

`copy.deepcopy` of a compiled module can give back an uncompiled one (`torch.compile` of a module with its own
``__deepcopy__``, and every module after ``module.compile()``), so a copy has to be compiled anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule

from partita.errors import ArgumentTypeError

__all__ = ["compile_in_place_like", "compiled_like", "draws_other_numbers", "inside_compiled", "is_compiled"]


def inside_compiled(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module inside of one that ``torch.compile`` returned; None for any other module."""
    return module._orig_mod if isinstance(module, OptimizedModule) else None


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` returned the module, or its ``compile()`` was called; whatever is in it."""
    return isinstance(module, OptimizedModule) or vars(module).get("_compiled_call_impl") is not None


def compiled_like(compiled: torch.nn.Module, inner: torch.nn.Module) -> torch.nn.Module:
    """``inner`` compiled with the backend and options of ``compiled``.

    Raises:
        ArgumentTypeError: ``compiled`` is not what ``torch.compile`` returned for a module.
    """
    if not isinstance(compiled, OptimizedModule):
        raise ArgumentTypeError(f"a {type(compiled).__name__} is not what torch.compile returns for a module")
    return OptimizedModule(inner, compiled.dynamo_ctx)


def compile_in_place_like(original: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Where ``original`` was compiled in place, compile ``copied`` in place with the same options.

    Raises:
        ArgumentTypeError: the options can't be found.
    """
    if vars(original).get("_compiled_call_impl") is None:
        return
    context = _in_place_context(original)
    if context is None:
        raise ArgumentTypeError(f"can't find out how this {type(original).__name__} was compiled in place")
    copied._compiled_call_impl = context(copied._call_impl)


def draws_other_numbers(value: Any) -> bool:
    """Whether a function or module, or a module in it, is compiled by Inductor with its own random numbers.

    Inductor draws other numbers than eager mode, unless ``fallback_random`` is set, in its configuration or
    as an option of ``torch.compile``.
    """
    modules = value.modules() if isinstance(value, torch.nn.Module) else ()
    contexts = [context for module in modules for context in (_own_context(module),) if context is not None]
    configs = [getattr(context, "compiler_config", None) for context in contexts]
    ask = getattr(value, "get_compiler_config", None)  # of a compiled function
    if callable(ask) and not contexts:
        configs.append(ask())
    return any(config is not None and not config.get("fallback_random", False) for config in configs)


def _own_context(module: torch.nn.Module) -> Any:
    """What a module was compiled with; None for one that was not."""
    return module.dynamo_ctx if isinstance(module, OptimizedModule) else _in_place_context(module)


def _in_place_context(module: torch.nn.Module) -> Any:
    """What ``module.compile()`` compiled with; None where it was not called, or where that can't be found."""
    call = vars(module).get("_compiled_call_impl")
    if call is None:
        return None
    cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
    return cells["self"].cell_contents if "self" in cells else None
