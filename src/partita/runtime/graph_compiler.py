"""The compiler of the graphs that AOTAutograd makes, and of pieces of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch.fx import GraphModule

from partita._torch.compile.aot import AotGraph
from partita._torch.compile.inductor import inductor_settings
from partita._torch.compile.refusal import changed_by_tracing
from partita._torch.graph_module.lazy_module import generate_code
from partita.errors import ArgumentError, NotCompiled
from partita.runtime.piece_runner import OperatorRunner, PieceRunner

__all__ = [
    "InnerCompiler",
    "check_inner",
    "graph_as_it_is",
    "inductors_settings",
    "resolve_inner",
    "runs_as_it_is",
    "runs_by_operator",
]

_CUDA_GRAPHS = "triton.cudagraphs"

InnerCompiler: TypeAlias = str | PieceRunner | Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""``"inductor"``, ``"aot_eager"``, a `partita.runtime.PieceRunner`, or a function from a flat graph and
example inputs to what runs it."""


def check_inner(inner: InnerCompiler, name: str = "inner") -> InnerCompiler:
    """Return ``inner`` itself, where it is one.

    Args:
        name: of the argument, for the message.

    Raises:
        ArgumentError: a name that is not known, or what can't be called.
    """
    is_compiler = inner in ("inductor", "aot_eager") if isinstance(inner, str) else callable(inner)
    if not is_compiler and not isinstance(inner, PieceRunner):
        raise ArgumentError(
            f"{name} is 'inductor', 'aot_eager', a PieceRunner, or a function (gm, example_inputs) -> "
            f"callable, got {inner!r}"
        )
    return inner


def resolve_inner(inner: InnerCompiler) -> Callable[[AotGraph], Callable[..., Any]] | None:
    """Return what compiles the graphs of one training graph, and pieces of them; None for Inductor.

    Raises:
        ArgumentError: see `check_inner`.
    """
    checked = check_inner(inner)
    if isinstance(checked, PieceRunner):
        return partial(_run_by, checked)
    if isinstance(checked, str):
        return None if checked == "inductor" else graph_as_it_is
    return partial(_run_by_function, checked)


def runs_by_operator(inner: InnerCompiler) -> bool:
    """Whether graphs run operator by operator, as eager mode does: on inputs of any strides."""
    if isinstance(inner, OperatorRunner):
        return inner.by_operator
    return isinstance(inner, str) and inner == "aot_eager"


def graph_as_it_is(graph: AotGraph) -> Callable[..., Any]:
    """What runs a graph operator by operator."""
    generate_code(graph.gm)
    return graph.gm.forward


def _run_by_function(
    function: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]], graph: AotGraph
) -> Callable[..., Any]:
    compiled = function(graph.gm, list(graph.examples))
    if not callable(compiled):
        raise ArgumentError(
            f"{getattr(function, '__qualname__', function)!s} compiles graphs and returned {compiled!r:.60} "
            "for one: return a function of the graph's inputs, such as gm.forward"
        )
    return compiled


def _run_by(runner: PieceRunner, graph: AotGraph) -> Callable[..., Any]:
    return runner.for_graph(graph.gm, fixed_inputs=graph.static_inputs, returned=graph.returned)


def inductors_settings(
    inner: InnerCompiler, mode: str | None, options: Mapping[str, Any], *, name: str, no_cuda_graphs: str
) -> dict[str, Any]:
    """Return the configuration that a mode and options of ``torch.compile`` stand for.

    Args:
        name: of the argument that is ``inner``, for messages.
        no_cuda_graphs: what is said to those who ask for Inductor's CUDA graphs.

    Raises:
        ArgumentError: torch does not know them, they ask for CUDA graphs, or ``inner`` is not Inductor.
    """
    if inner != "inductor" and (options or mode is not None):
        raise ArgumentError(
            f"mode and options are Inductor's, and {name} is {inner!r}: leave out "
            f"{'mode' if mode is not None else sorted(options)[0]!r}"
        )
    try:
        settings = inductor_settings(mode, options)
    except RuntimeError as error:
        reason = str(error).partition(", known options are")[0]  # several hundred of them
        raise ArgumentError(
            f"beside {name}, mode and options are those that Inductor knows: {reason}; see "
            "torch._inductor.list_mode_options() and list_options()"
        ) from error
    if settings.get(_CUDA_GRAPHS):
        raise ArgumentError(no_cuda_graphs)
    return settings


def runs_as_it_is(gm: GraphModule) -> bool:
    """Whether a graph of Dynamo's would compute other numbers once it is traced; it warns then.

    Warns:
        NotCompiled: says why.
    """
    why = changed_by_tracing(gm)
    if why:
        warnings.warn(f"a graph runs uncompiled, with the same results: {why}", NotCompiled, stacklevel=3)
    return bool(why)
