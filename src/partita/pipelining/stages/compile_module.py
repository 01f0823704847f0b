"""A stage's module that runs compiled."""

from __future__ import annotations

from torch import nn

from partita.pipelining.compiled.compiled_forward import CompiledForward
from partita.pipelining.interface.compile_options import CompileOptions
from partita.pipelining.interface.routes import Routes
from partita.pipelining.stages.backward.tied_share import TiedShares

__all__ = ["compile_module"]


def compile_module(module: nn.Module, index: int, routes: Routes, options: CompileOptions) -> None:
    """Let the module of stage ``index`` run compiled from now on, whoever calls it."""
    shared = {*TiedShares(module, index, routes).names, *routes.passed_on(index)}
    hands_on = index < routes.stages - 1
    vars(module)["forward"] = CompiledForward(module, options, f"stage {index}", shared, hands_on=hands_on)
