"""The graphs of training, with the backward graph open to be cut before it is compiled.

Torch's own frame (AOTAutograd, and Inductor around it) makes a forward and a backward graph. A function of
the caller's gets each with a compiler: to compile the graph as it is, or to cut a backward graph and compile
the pieces one by one, now or later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from partita._torch.autograd.region_switches import autocast_off
from partita._torch.compile.aot import (
    AotGraph,
    AotGraphKind,
    AotRecords,
    Boxed,
    boxed,
    compile_ahead,
    copy_where_no_view,
    no_donated_buffers,
    save_what_runs_once,
)
from partita._torch.compile.vector_trials import remembered_trials
from partita._torch.compile.views_without_gradient import keep_from_gradient, results_without_gradient
from partita._torch.containers.replaced import replaced

__all__ = ["CompileGraph", "GraphCompiler", "compile_training"]

CompileGraph: TypeAlias = Callable[[AotGraph], Callable[..., Any]]
"""From a graph, or a piece of one, to what runs it."""


@dataclass(frozen=True)
class GraphCompiler:
    """Compiles a graph as a whole; of a backward graph also pieces, and when torch has left its frame.

    Attributes:
        inner: compiles what it is given.
        frame: the one that torch compiles in.
    """

    inner: CompileGraph
    frame: Callable[[], AbstractContextManager[Any]]

    def __call__(self, graph: AotGraph) -> Boxed:
        """What runs the graph."""
        with self.frame():
            return boxed(self.inner(graph))


def compile_training(
    gm: GraphModule,
    inputs: Sequence[Any],
    compile_graph: Callable[[AotGraph, GraphCompiler], Boxed],
    *,
    inner: CompileGraph | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    static_positions: Sequence[int] = (),
    by_operator: bool = False,
    backward_too: bool = False,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's for training and inference.

    Args:
        inputs: those that Dynamo hands to a backend.
        compile_graph: compiles each graph with the compiler that it is given.
        inner: that compiler; Inductor by default.
        settings: of Inductor's configuration, for all of its graphs.
        static_positions: of the inputs that are parameters or buffers, besides those that Dynamo sees.
        by_operator: see `compile_ahead`; of ``inner``.
        backward_too: give ``compile_graph`` the backward graph now; else when it is first needed.

    Returns:
        A function of the same inputs.
    """
    # The cache would hand out backward graphs that nobody has cut.
    with (
        no_donated_buffers(),
        functorch_config.patch(
            enable_autograd_cache=False,
            force_non_lazy_backward_lowering=backward_too,
        ),
    ):
        if inner is None:
            # Inductor's passes are imported by those who use them: that takes as long as half of torch.
            from torch._inductor import compile_fx

            inside = _inside_inductor(compile_graph, settings, static_positions)
            # With a smaller budget torch draws eager's random numbers again in the backward pass, and gets
            # others (2.13). Inductor's own come from saved seeds.
            draws_again = settings.get("fallback_random", inductor_config.fallback_random)
            budget = functorch_config.patch(activation_memory_budget=1.0) if draws_again else nullcontext()
            with budget, remembered_trials(), _partitioned_as_elsewhere(compile_fx):
                without_gradient = results_without_gradient(gm)
                run = compile_fx.compile_fx(gm, inputs, inner_compile=inside, config_patches=dict(settings))
                return keep_from_gradient(run, without_gradient)  # type: ignore[arg-type]
        compiler = inner
        return compile_ahead(
            gm,
            inputs,
            lambda graph: compile_graph(graph, _graph_compiler(graph, compiler, None)),
            static_positions,
            by_operator=by_operator,
        )


def _partitioned_as_elsewhere(compile_fx: Any) -> AbstractContextManager[None]:
    """In this block, Inductor's partition of a joint graph saves what `save_what_runs_once` says. It computes
    some of the forward graph a second time in the backward graph.
    """
    cut = compile_fx.min_cut_rematerialization_partition

    def partition(joint: GraphModule, inputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        save_what_runs_once(joint, may_recompute=True)
        return cut(joint, inputs, *args, **options)

    return replaced(compile_fx, "min_cut_rematerialization_partition", partition)


def _graph_compiler(
    graph: AotGraph, inner: CompileGraph, settings: Mapping[str, Any] | None
) -> GraphCompiler:
    """What compiles ``graph``.

    Args:
        settings: Inductor's; None where another compiler is at work.
    """
    if graph.kind != "backward":
        return GraphCompiler(inner, nullcontext)
    _follow_layout(graph)
    return GraphCompiler(inner, _frame(graph.examples, settings))


def _inside_inductor(
    compile_graph: Callable[[AotGraph, GraphCompiler], Boxed],
    settings: Mapping[str, Any],
    static_positions: Sequence[int],
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    recorder = AotRecords(static_positions)

    def compile_one(gm: GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        kind: AotGraphKind = "inference" if options.get("is_inference") else "forward"
        if options.get("is_backward"):
            kind = "backward"

        def compile_whole(graph: AotGraph) -> Any:
            return compile_fx_inner(graph.gm, list(graph.examples), **options)

        def compile_piece(piece: AotGraph) -> Any:
            output = piece.gm.graph.output_node()
            (results,) = output.args
            assert isinstance(results, tuple)
            # those of inputs without a gradient are None
            tensors = [place for place, result in enumerate(results) if isinstance(result, Node)]
            output.meta["user_visible_output_idxs"] = tensors
            gm = _known_by_its_code(piece.gm)
            return compile_fx_inner(gm, list(piece.examples), cudagraphs=BoxedBool(False), **for_pieces)

        of_the_whole = ("static_input_idxs", "cudagraphs", "boxed_forward_device_index")
        for_pieces = {key: value for key, value in options.items() if key not in of_the_whole}
        graph = recorder.graph(kind, gm, examples)
        inner = compile_piece if kind == "backward" else compile_whole
        return compile_graph(graph, _graph_compiler(graph, inner, settings))

    return compile_one


def _known_by_its_code(gm: GraphModule) -> GraphModule:
    """The graph in a module of torch's own, which Inductor's cache on disk knows by its code. One of ours
    would be known by its nodes' stack traces and numbers too: equal graphs of other stages, ranks and starts
    were compiled again.
    """
    module = GraphModule(gm, gm.graph)
    module.meta = gm.meta
    return module


def _follow_layout(graph: AotGraph) -> None:
    """Where the compiled forward graph saves values in another layout than the traced one (convolutions with
    channels last), the example inputs say so, and the graph does not: let all of its example values follow.
    """
    placeholders = graph.gm.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, graph.examples, strict=True)
    if all(node.meta["val"] is example for node, example in pairs):
        return
    mode = detect_fake_mode(graph.examples)
    assert mode is not None
    copy_where_no_view(graph.gm)
    with torch.no_grad():
        FakeTensorProp(graph.gm, mode).propagate_dont_convert_inputs(*graph.examples)


def _frame(
    examples: Sequence[Any], settings: Mapping[str, Any] | None
) -> Callable[[], AbstractContextManager[Any]]:
    """The frame that torch compiles in at this moment, to be entered again."""
    context = TracingContext.try_get()
    mode = detect_fake_mode(examples)

    def enter() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(tracing(context) if context is not None else nullcontext())
        stack.enter_context(autocast_off())
        if settings is not None:
            from torch._inductor.virtualized import V

            stack.enter_context(inductor_config.patch(dict(settings)))
            stack.enter_context(V.set_fake_mode(mode) if mode is not None else nullcontext())
        return stack

    return enter
