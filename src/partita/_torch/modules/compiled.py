"""Compiled modules, and how to compile another module in the same way.

`copy.deepcopy` of a compiled module can give back an uncompiled one (`torch.compile` of a module with its own
``__deepcopy__``, and every module after ``module.compile()``), so a copy has to be compiled anew.
"""

from __future__ import annotations

import torch
from torch._dynamo.eval_frame import OptimizedModule

from partita.errors import ArgumentTypeError

__all__ = ["compile_in_place_like", "compiled_like", "inside_compiled"]


def inside_compiled(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module inside of one that ``torch.compile`` returned; None for any other module."""
    return module._orig_mod if isinstance(module, OptimizedModule) else None


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
    call = vars(original).get("_compiled_call_impl")
    if call is None:
        return
    cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
    if "self" not in cells:
        raise ArgumentTypeError(f"can't find out how this {type(original).__name__} was compiled in place")
    copied._compiled_call_impl = cells["self"].cell_contents(copied._call_impl)
