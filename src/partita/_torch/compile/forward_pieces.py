"""Compiling the pieces of one Dynamo graph with a backend, each as if it were a graph of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._dynamo.utils import counters, to_fake_tensor
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import is_fake
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.symbol import SymT, symbol_is_type

from partita._torch.compile.views_without_gradient import keep_from_gradient, results_without_gradient
from partita._torch.graph_module.graph_copy import copy_graph
from partita._torch.graph_module.lazy_module import lazy_module

__all__ = [
    "CompiledPiece",
    "as_fake",
    "compile_forward_piece",
    "copy_module",
    "inherit_marks",
    "is_of_dynamic_floats",
    "must_reach_dynamo",
    "run_fake",
    "with_strides_of",
    "wraps_others",
]

CompiledPiece = Callable[..., Any]


def inherit_marks(whole: GraphModule, piece: GraphModule) -> None:
    """Give a piece what Dynamo has noted on the graph that it was cut from: where inputs come from."""
    sources = {
        node.name: getattr(node, "_dynamo_source", None) for node in whole.graph.find_nodes(op="placeholder")
    }
    for node in piece.graph.find_nodes(op="placeholder"):
        node._dynamo_source = sources.get(node.name)
    piece.meta = dict(whole.meta)
    if hasattr(whole, "_param_name_to_source"):
        piece._param_name_to_source = whole._param_name_to_source


def copy_module(gm: GraphModule) -> GraphModule:
    """A module with the same attributes and a graph of its own, for a compiler that changes what it is
    given.
    """
    copied = lazy_module(copy_graph(gm.graph), type(gm).__name__, training=gm.training)
    inputs = zip(*(each.graph.find_nodes(op="placeholder") for each in (gm, copied)), strict=True)
    for node, its_copy in inputs:
        if hasattr(node, "_dynamo_source"):
            its_copy._dynamo_source = node._dynamo_source
    vars(copied).update({name: value for name, value in vars(gm).items() if name != "_graph"})
    return copied


def as_fake(examples: Sequence[Any]) -> list[Any]:
    """Return ``examples``, all tensors of which are fake where some are, or where Dynamo is compiling: then
    of the mode that it has made for backends, with the sizes and floats that it takes to be dynamic.
    """
    mode = detect_fake_mode(list(examples))
    return [
        to_fake_tensor(value, mode)
        if mode is not None and isinstance(value, torch.Tensor) and not is_fake(value)
        else value
        for value in examples
    ]


def is_of_dynamic_floats(value: Any) -> bool:
    """Whether a node's example is a Python float of the user's that Dynamo takes to be dynamic, or a number
    computed of such ones, integers too; what ``item()`` reads from a tensor of the user's is not.
    """
    if not isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool) or not value.node.has_hint():
        return False
    symbols = value.node.expr.free_symbols
    return isinstance(value, torch.SymFloat) or any(symbol_is_type(one, SymT.FLOAT) for one in symbols)


def with_strides_of(results: Sequence[Any], models: Sequence[Any]) -> list[Any]:
    """``results``, fake tensors, with the strides of ``models``."""
    restrided = []
    for result, other in zip(results, models, strict=True):
        if isinstance(result, torch.Tensor) and result.stride() != other.stride():
            again = run_fake(
                lambda r, o: torch.empty_strided(o.shape, o.stride(), dtype=r.dtype, device=r.device),
                [result, other],
            )
            restrided.append(again.requires_grad_(result.requires_grad))
        else:
            restrided.append(result)
    return restrided


def run_fake(run: Callable[..., Any], examples: Sequence[Any]) -> Any:
    """What ``run`` gives for fake tensors."""
    mode = detect_fake_mode(list(examples))
    if mode is None:
        return run(*examples)
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            return run(*examples)
    finally:
        mode.allow_non_fake_inputs = allowed


def compile_forward_piece(
    gm: GraphModule, examples: Sequence[Any], backend: Callable[..., CompiledPiece], options: dict[str, Any]
) -> tuple[CompiledPiece, Any]:
    """Compile one piece, and find out what it returns.

    The strides are read from what AOTAutograd returns when its function is called for the first time, with
    fakes. Where tensors wrap others, that is what they wrap, so the piece as it came is run instead. So it is
    where tokens, which come before the results, keep operators with effects in their order: that is seen only
    after compiling, and such a piece is compiled once more.

    The piece gets a tracing context of its own. Backward graphs are compiled later, in whatever order their
    outputs are used, and read from it what belongs to their own piece.

    Args:
        examples: fake tensors and sizes.
        options: further arguments of ``backend``.

    Returns:
        What runs the piece, and its results for the examples, with the strides that the compiler chose.

    Raises:
        Exception: whatever ``backend`` raises.
    """
    whole = TracingContext.try_get()
    own = None
    if whole is not None:
        own = copy.copy(whole)
        own.fw_metadata = None
        own.ddp_optimizer_ctx = None
        own.fakify_first_call = not wraps_others([examples, _results(gm)])
    original = copy_module(gm)
    without_gradient = results_without_gradient(gm)
    before = counters["aot_autograd"]["total"]
    with tracing(own) if own is not None else nullcontext():
        run = backend(gm, list(examples), **options)
        through_aot = counters["aot_autograd"]["total"] != before
        if own is not None and through_aot and _has_tokens(own):
            own.fakify_first_call = False
            run = backend(copy_module(original), list(examples), **options)
        if own is not None and through_aot and own.fakify_first_call:
            results = run_fake(run, examples)
            own.fakify_first_call = False
            return keep_from_gradient(run, without_gradient), results
    return keep_from_gradient(run, without_gradient), run_fake(original, examples)


def wraps_others(values: Any) -> bool:
    """Whether a tensor among ``values`` wraps other tensors (a jagged nested tensor, a `DTensor`)."""
    return any(is_traceable_wrapper_subclass(leaf) for leaf in pytree.tree_leaves(values))


def _results(gm: GraphModule) -> list[Any]:
    """What Dynamo noted of what a piece returns."""
    return [node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes]


def _has_tokens(context: TracingContext) -> bool:
    """Whether the forward graph that was compiled last takes and returns tokens."""
    return context.fw_metadata is not None and bool(context.fw_metadata.tokens)


def must_reach_dynamo(error: BaseException) -> bool:
    """Whether an error of a backend is a message to Dynamo, which then starts anew or skips the frame."""
    return isinstance(error, (RestartAnalysis, SkipFrame))
