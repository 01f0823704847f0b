"""AOTAutograd as the frame of a backend: forward, backward and inference graphs, each given to a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.fx import GraphModule

__all__ = ["GraphCompiler", "compile_ahead", "forward_returns", "static_placeholders"]

GraphCompiler: TypeAlias = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""From a flat functional graph and its example inputs (fake tensors) to what runs it."""


def compile_ahead(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    forward: GraphCompiler,
    backward: GraphCompiler,
    inference: GraphCompiler,
) -> Callable[..., Any]:
    """Give the forward, backward and inference graphs of a Dynamo graph to their compilers.

    Writes to inputs stay in the graphs, as ``copy_`` at their end.

    Args:
        inputs: those that Dynamo hands to a backend.

    Returns:
        A function of the same inputs.
    """
    compiler = aot_autograd(
        fw_compiler=_boxed(forward),
        bw_compiler=_boxed(backward),
        inference_compiler=_boxed(inference),
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = compiler(gm, inputs)
    return compiled


def static_placeholders() -> frozenset[int]:
    """Indices of the inputs of the forward graph being compiled that are parameters or buffers: they keep
    their addresses from run to run.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return frozenset()
    return frozenset(context.fw_metadata.static_input_indices)


def forward_returns() -> int | None:
    """How many of the outputs of the forward graph being compiled leave it; those behind them are saved, and
    only backward reads them. None outside of such a compilation.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None or not hasattr(context.fw_metadata, "num_forward"):
        return None
    return int(context.fw_metadata.num_forward)


def _boxed(compiler: GraphCompiler) -> GraphCompiler:
    """AOTAutograd hands over inputs in a list, so that what is used up can be freed."""

    def compile_boxed(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = compiler(gm, inputs)

        def boxed(values: list[Any]) -> Any:
            taken = tuple(values)
            values.clear()
            with torch.no_grad():
                return run(*taken)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    return compile_boxed
