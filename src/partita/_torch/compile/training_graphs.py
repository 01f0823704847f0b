"""Compilers for the two graphs of training, with the backward graph open to be cut before it is compiled.

Torch's own frame (AOTAutograd, and Inductor around it) makes a forward and a backward graph. Here the forward
graph goes to the compiler untouched, and the backward graph to a function of the caller's, which may cut it
and compiles the pieces one by one, now or later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

__all__ = ["BackwardCompiler", "Boxed", "PieceCompiler", "compile_training"]

Boxed: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Takes its inputs in a list, which it empties, so that what is used up can be freed."""

BackwardCompiler: TypeAlias = Callable[[GraphModule, Sequence[Any], "PieceCompiler"], Boxed]
"""From a backward graph, its example inputs and a compiler of pieces to what runs it."""


@dataclass(frozen=True)
class PieceCompiler:
    """Compiles pieces of one backward graph; also later, when torch has left the frame that it compiles in.

    Args:
        compile: from a graph that returns a tuple, and example inputs, to what runs it.
        context: in which torch compiles.
    """

    compile: Callable[[GraphModule, Sequence[Any]], Boxed]
    context: Callable[[], AbstractContextManager[Any]]

    def __call__(self, gm: GraphModule) -> Boxed:
        """Compile one piece. Its outputs have the strides that the example values say."""
        examples = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
        with self.context():
            return self.compile(gm, examples)


def compile_training(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    inner: str | Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    forward: Callable[[GraphModule], None],
    backward: BackwardCompiler,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's for training and inference.

    Args:
        inputs: those that Dynamo hands to a backend.
        inner: ``"inductor"``, or a function from a flat graph and example inputs to what runs it.
        forward: is shown each forward graph that will have a backward graph, before it is compiled.
        backward: compiles that backward graph.
        settings: of Inductor's configuration, for all of its graphs.

    Returns:
        A function of the same inputs.
    """
    # Saved values that a graph may overwrite are listed for the whole backward graph; a piece would take the
    # numbers for those of its own inputs. The cache would hand out backward graphs that nobody has cut.
    with functorch_config.patch(donated_buffer=False, enable_autograd_cache=False):
        if inner == "inductor":
            inside = _inside_inductor(forward, backward, settings)
            return compile_fx(gm, inputs, inner_compile=inside, config_patches=dict(settings))  # type: ignore[return-value]
        assert callable(inner)
        return _with_any(gm, inputs, inner, forward, backward)


def _inside_inductor(
    forward: Callable[[GraphModule], None], backward: BackwardCompiler, settings: Mapping[str, Any]
) -> Callable[..., Any]:
    def compile_one(gm: GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_backward"):
            if not options.get("is_inference"):
                forward(gm)
            return compile_fx_inner(gm, examples, **options)
        for_pieces = {
            key: value
            for key, value in options.items()
            if key not in ("static_input_idxs", "cudagraphs", "boxed_forward_device_index")
        }

        def compile_piece(piece: GraphModule, inputs: Sequence[Any]) -> Boxed:
            output = piece.graph.output_node()
            (results,) = output.args
            assert isinstance(results, tuple)
            output.meta["user_visible_output_idxs"] = list(range(len(results)))
            compiled: Any = compile_fx_inner(piece, inputs, cudagraphs=BoxedBool(False), **for_pieces)
            return compiled if getattr(compiled, "_boxed_call", False) else _boxed(compiled)

        _follow_layout(gm, examples)
        return _mark(backward(gm, examples, PieceCompiler(compile_piece, _context(examples, settings))))

    return compile_one


def _follow_layout(gm: GraphModule, examples: Sequence[Any]) -> None:
    """Where the compiled forward graph saves values in another layout than the traced one (convolutions with
    channels last), the example inputs say so, and the graph does not: let all of its example values follow.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if all(node.meta["val"] is example for node, example in zip(placeholders, examples, strict=True)):
        return
    mode = detect_fake_mode(examples)
    assert mode is not None
    view_to_reshape(gm)  # as Inductor itself does later: not every view is one in another layout
    with torch.no_grad():
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*examples)


def _with_any(
    gm: GraphModule,
    inputs: Sequence[Any],
    inner: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    forward: Callable[[GraphModule], None],
    backward: BackwardCompiler,
) -> Callable[..., Any]:
    def compile_piece(piece: GraphModule, examples: Sequence[Any]) -> Boxed:
        run = inner(piece, examples)
        return run if getattr(run, "_boxed_call", False) else _boxed(run)

    def compile_forward(graph: GraphModule, examples: Sequence[Any]) -> Boxed:
        forward(graph)
        return compile_piece(graph, examples)

    def compile_backward(graph: GraphModule, examples: Sequence[Any]) -> Boxed:
        _follow_layout(graph, examples)
        return _mark(backward(graph, examples, PieceCompiler(compile_piece, _context(examples, None))))

    compiler = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=compile_piece,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = compiler(gm, inputs)
    return compiled


def _context(
    examples: Sequence[Any], settings: Mapping[str, Any] | None
) -> Callable[[], AbstractContextManager[Any]]:
    """The frame that torch compiles in at this moment, to be entered again.

    Args:
        settings: Inductor's; None where another compiler is at work.
    """
    context = TracingContext.try_get()
    mode = detect_fake_mode(examples)

    def enter() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(tracing(context) if context is not None else nullcontext())
        stack.enter_context(torch._C._DisableAutocast())
        if settings is not None:
            stack.enter_context(inductor_config.patch(dict(settings)))
            stack.enter_context(V.set_fake_mode(mode) if mode is not None else nullcontext())
        return stack

    return enter


def _boxed(run: Callable[..., Any]) -> Boxed:
    def boxed(values: list[Any]) -> Sequence[Any]:
        taken = tuple(values)
        values.clear()
        with torch.no_grad():
            results: Sequence[Any] = run(*taken)
        return results

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _mark(run: Boxed) -> Boxed:
    def boxed(values: list[Any]) -> Sequence[Any]:
        return run(values)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed
