"""Inductor for one piece of a graph that AOTAutograd has made, without CUDA graphs of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule

from partita._torch.compile.vector_trials import remembered_trials

__all__ = [
    "compile_with_inductor",
    "configuration_hash",
    "draws_own_numbers",
    "inductor_settings",
    "kernel_settings",
]

_SETTINGS = {
    "triton.cudagraphs": False,  # the region around it is recorded; a graph inside of a graph is an error
    "triton.cudagraph_trees": False,
    "fallback_random": True,  # the numbers that the operators draw, in their order
}


def inductor_settings(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's configuration for a mode and options of ``torch.compile``.

    Raises:
        RuntimeError: a mode, an option or a value that torch does not know.
    """
    if mode is None and not options:
        return {}
    return dict(torch._TorchCompileInductorWrapper(mode, dict(options), None).config)


def draws_own_numbers(settings: Mapping[str, Any]) -> bool:
    """Whether what Inductor compiles with these settings draws other random numbers than eager mode."""
    from torch._inductor import config

    return not settings.get("fallback_random", config.fallback_random)


def configuration_hash() -> str:
    """Equal for equal configurations of AOTAutograd and Inductor, which Dynamo does not guard on."""
    from torch._functorch import config as functorch_config  # as below
    from torch._inductor import config

    return f"{functorch_config.get_hash().hex()} {config.get_hash().hex()}"


def kernel_settings() -> tuple[Any, ...]:
    """What else in the process decides which kernels a graph is compiled to; Dynamo guards on it."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
    )


def compile_with_inductor(gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """A function of the same inputs, with the same random numbers as the graph.

    Args:
        gm: flat, of operators. It is not changed.
        examples: one value a placeholder, fake or real; their symbols stay symbols.
    """
    from torch._inductor import config, standalone_compile  # half a second, for who compiles

    symbols: Literal["from_graph", "from_tracing_context"]
    symbols = "from_graph" if TracingContext.try_get() is None else "from_tracing_context"
    with torch.no_grad(), config.patch(_SETTINGS), remembered_trials():
        return standalone_compile(gm, list(examples), dynamic_shapes=symbols)
