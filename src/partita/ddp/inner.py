"""The compiler of forward graphs and backward pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch.fx import GraphModule

from partita._torch.compile.aot import forward_returns, static_placeholders
from partita._torch.compile.inductor import inductor_settings
from partita.errors import ArgumentError
from partita.runtime import PieceRunner

__all__ = ["InnerCompiler", "RunThrough", "check_inner", "inductors_settings", "resolve_inner"]

_CUDA_GRAPHS = "triton.cudagraphs"

InnerCompiler: TypeAlias = str | PieceRunner | Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""``"inductor"``, ``"aot_eager"``, a `partita.runtime.PieceRunner`, or a function from a flat graph and
example inputs to what runs it."""


class RunThrough:
    """The compiler that gives the graphs of one training graph to a piece runner.

    Args:
        runner: runs the forward graph, the inference graph, and each piece of the backward graph.
    """

    def __init__(self, runner: PieceRunner) -> None:
        self._runner = runner
        self._forward: GraphModule | None = None
        self._fixed: frozenset[str] = frozenset()

    def note_forward(self, gm: GraphModule) -> None:
        """This graph will have a backward graph; called while torch compiles it."""
        self._forward = gm

    def __call__(self, gm: GraphModule, _examples: Sequence[Any]) -> Callable[..., Any]:
        """The forward graph, or that of inference; then pieces of the backward graph. The reducer copies
        their gradients, and the pieces behind read the rest: nobody keeps any of it for long.
        """
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        if self._forward is not None and gm is not self._forward:
            return self._runner.for_graph(gm, fixed_inputs=self._fixed.intersection(names), returned=0)
        self._fixed = frozenset(names[index] for index in static_placeholders() if index < len(names))
        returned = None if self._forward is None else forward_returns()
        return self._runner.for_graph(gm, fixed_inputs=self._fixed, returned=returned)


def check_inner(inner: InnerCompiler) -> InnerCompiler:
    """``inner`` itself.

    Raises:
        ArgumentError: a name that is not known, or what can't be called.
    """
    known = inner in ("inductor", "aot_eager") if isinstance(inner, str) else callable(inner)
    if not known and not isinstance(inner, PieceRunner):
        raise ArgumentError(
            "inner is 'inductor', 'aot_eager', a PieceRunner, or a function (gm, example_inputs) -> "
            f"callable, got {inner!r}"
        )
    return inner


def resolve_inner(
    inner: InnerCompiler,
) -> str | RunThrough | Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    """What compiles the graphs of one training graph: ``"inductor"``, or a function.

    Raises:
        ArgumentError: see `check_inner`.
    """
    checked = check_inner(inner)
    if isinstance(checked, PieceRunner):
        return RunThrough(checked)
    return _as_it_is if checked == "aot_eager" else checked


def inductors_settings(inner: InnerCompiler, mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that a mode and options of ``torch.compile`` stand for.

    Raises:
        ArgumentError: torch does not know them, they ask for CUDA graphs, or ``inner`` is not Inductor.
    """
    if inner != "inductor" and (options or mode is not None):
        raise ArgumentError(
            f"mode and options other than inner are Inductor's, and inner is {inner!r}: leave out "
            f"{'mode' if mode is not None else sorted(options)[0]!r}"
        )
    try:
        settings = inductor_settings(mode, options)
    except RuntimeError as error:
        reason = str(error).partition(", known options are")[0]  # several hundred of them
        raise ArgumentError(
            f"partita_ddp takes inner, and mode and options that Inductor knows: {reason}; see "
            "torch._inductor.list_mode_options() and list_options()"
        ) from error
    if settings.get(_CUDA_GRAPHS):
        raise ArgumentError(
            "Inductor's CUDA graphs can't be cut where buckets are sent: pass "
            "inner=partita.cudagraphs.CudaGraphsRunner() to replicate(), or "
            "mode='max-autotune-no-cudagraphs' to torch.compile"
        )
    return settings


def _as_it_is(gm: GraphModule, _examples: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward
