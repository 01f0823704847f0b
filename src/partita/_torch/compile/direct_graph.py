"""A graph of training that is called without the frames that torch lays around it.

Between a function of ``torch.compile`` and its forward graph stand Dynamo (guards) and AOTAutograd (aliases
of inputs, subclasses, tokens, what is written), in Python mostly: for a small graph they take longer than its
kernels. Where a graph needs nothing of that, it is called straight away, under an autograd function that
saves and restores what AOTAutograd's would, when the same guards say that it may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch._guards import TracingContext

from partita._torch.autograd.compiled_node import prepare
from partita._torch.autograd.region_switches import autocast_off
from partita._torch.compile.aot import AotGraph, Boxed
from partita.errors import ExecutionError

__all__ = ["CallGuard", "DirectGraph", "Readiness"]


Readiness: TypeAlias = Literal["ready", "later", "never"]
"""Whether a graph may be called directly; later: once its backward graph is there."""


class CallGuard:
    """Whether a compiled graph holds for a call, by the guards that Dynamo itself compares with: of each
    tensor its type, shape, strides, dtype, device and whether it needs a gradient, that no two are the same,
    and torch's global state (autocast, gradients on or off, number of threads, ...).

    Args:
        values: the arguments of a call that the graph holds for.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        from torch._C._dynamo import guards

        self._places = tuple(place for place, value in enumerate(values) if isinstance(value, Tensor))
        tensors = [values[place] for place in self._places]
        self._tensors = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._count = len(values)
        self._only_tensors = len(tensors) == self._count
        self._others = _others(values)
        self._state = guards.GlobalStateGuard()

    def holds(self, values: Sequence[Any]) -> bool:
        """Whether the graph holds for a call with these arguments."""
        if len(values) != self._count:
            return False
        if self._only_tensors:
            same: bool = self._tensors.check(*values) and self._state.check()
            return same
        tensors = [values[place] for place in self._places]
        return self._tensors.check(*tensors) and self._others == _others(values) and self._state.check()


def _others(values: Sequence[Any]) -> list[tuple[type, Any]]:
    return [(type(value), value) for value in values if not isinstance(value, Tensor)]


class DirectGraph:
    """What one graph of Dynamo's was compiled to.

    Args:
        first_site: the number of the next random call.
    """

    def __init__(self, first_site: Callable[[], int]) -> None:
        self._first_site = first_site
        self._facts: Any = None
        self._forward: Boxed | None = None
        self._inputs = 0
        self._trains = False
        self._backward: Boxed | None = None
        self._without_gradient: Sequence[int] = ()
        self._tangents: tuple[tuple[int, Any], ...] = ()
        self._lay_out: Callable[[Tensor, Any], Tensor]
        self._fixed: tuple[int, ...] = ()
        self._views: tuple[int, ...] = ()
        self._given_back: tuple[int, ...] = ()
        self._written: tuple[int, ...] = ()
        self._casts_itself = False

    def add_forward(self, graph: AotGraph, run: Boxed) -> None:
        """The forward graph of training or of evaluation, while torch compiles it."""
        context = TracingContext.try_get()
        self._facts = None if context is None else context.fw_metadata
        self._forward, self._inputs = run, len(graph.examples)
        self._trains = graph.kind == "forward"

    def add_backward(self, run: Boxed, without_gradient: Sequence[int]) -> None:
        """The backward graph.

        Args:
            without_gradient: positions of the forward graph's inputs that it has no gradient for.
        """
        self._backward, self._without_gradient = run, without_gradient

    def readiness(self, inputs: Sequence[Any], results: Sequence[Any]) -> Readiness:
        """Whether `run` does again what a call has just done.

        Args:
            inputs: of that call.
            results: likewise.
        """
        from torch._functorch._aot_autograd.runtime_wrappers import coerce_to_expected_memory_format

        facts, forward = self._facts, self._forward
        if facts is None or forward is None or not _needs_no_frame(facts):
            return "never"
        if self._trains and self._backward is None:
            return "later"
        if not self._inputs == len(facts.input_info) == len(inputs) or len(results) != facts.num_outputs:
            return "never"
        if any(type(value) not in (Tensor, torch.nn.Parameter) for value in (*inputs, *results)):
            return "never"
        inner = (facts.input_info[place] for place in self._without_gradient)
        if any(info.requires_grad and not info.is_leaf for info in inner):  # torch detaches those
            return "never"
        computed = [place for place in range(len(results)) if place not in facts.aliased_out_indices]
        trained = [place for place in computed if _has_tangent(facts.output_info[place])]
        layouts = [meta.memory_format for meta in facts.subclass_tangent_meta]
        if self._trains and (len(trained) != len(layouts) or None in layouts):
            return "never"
        self._tangents = tuple(zip(trained, layouts, strict=True)) if self._trains else ()
        self._lay_out = coerce_to_expected_memory_format
        self._written = tuple(facts.mutated_graph_handled_indices_seen_by_autograd)
        self._views = tuple(facts.unsafe_view_out_indices)
        self._given_back = tuple(facts.aliased_out_indices)
        self._fixed = tuple(place for place in computed if not facts.output_info[place].requires_grad)
        self._casts_itself = torch._C._is_any_autocast_enabled()
        return "ready"

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor | None]:
        """The results of the graph for these inputs; None, in training, for one that is an input itself. The
        list is emptied.
        """
        if self._written:
            torch.autograd.graph.increment_version([inputs[place] for place in self._written])
        if self._trains:
            taken = tuple(inputs)
            inputs.clear()
            with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():  # as AOTAutograd does
                results: tuple[Tensor | None, ...] = CompiledFunction.apply(self, *taken)
            return results
        assert self._forward is not None
        with torch.no_grad():
            return self._compute(self._forward, inputs)

    def forward(self, node: Any, inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
        """Run the forward graph, and let ``node`` save what it saves."""
        assert self._forward is not None
        values = self._compute(self._forward, inputs)
        facts = self._facts
        saved = values[facts.tensors_saved_for_backwards_with_vc_check_slice]
        node.save_for_backward(*map(_detached, saved))
        unchecked = values[facts.tensors_saved_for_backwards_no_vc_check_slice]
        node.unchecked = tuple(map(_detached, unchecked))
        results = list(values[: facts.num_outputs])
        for place in self._views:
            results[place] = torch.ops.aten._unsafe_view(results[place], results[place].shape)
        for place in self._given_back:
            results[place] = None
        if self._fixed:
            node.mark_non_differentiable(*[results[place] for place in self._fixed])
        node._materialize_non_diff_grads = False
        prepare(node, self._first_site())
        return tuple(results)

    def _laid_out(self, gradient: Tensor | None, layout: Any) -> Tensor | None:
        return None if gradient is None else self._lay_out(gradient, layout)

    def backward(self, node: Any, gradients: list[Any]) -> Sequence[Any]:
        """Run the backward graph."""
        if self._facts.deterministic is False and torch.are_deterministic_algorithms_enabled():
            raise ExecutionError(
                "the forward pass of a compiled stage ran without torch.use_deterministic_algorithms, and "
                "its backward pass is to run with it: turn it on before both"
            )
        assert self._backward is not None
        values = [*node.saved_tensors, *node.unchecked]
        node.maybe_clear_saved_tensors()
        values += [self._laid_out(gradients[place], layout) for place, layout in self._tangents]
        gradients.clear()
        return self._compute(self._backward, values)

    def _compute(self, run: Boxed, values: list[Any]) -> Sequence[Any]:
        """Run one of its graphs. Those that were traced under autocast have its casts in them."""
        if not self._casts_itself:
            return run(values)
        with autocast_off():
            return run(values)


class CompiledFunction(torch.autograd.Function):
    """Named as AOTAutograd's own: its node is known by that."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, graph: DirectGraph, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """See `DirectGraph.forward`."""
        ctx.graph = graph
        return graph.forward(ctx, list(inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """See `DirectGraph.backward`. Newer torch hands over a list, so that each can be freed early."""
        boxed = len(gradients) == 1 and isinstance(gradients[0], list)
        taken = gradients[0] if boxed else list(gradients)
        if not torch.is_grad_enabled():
            return None, *ctx.graph.backward(ctx, taken)
        with torch.no_grad():
            results = ctx.graph.backward(ctx, taken)
        return None, *_Once.apply(torch.empty(0, requires_grad=True), *results)


class _Once(torch.autograd.Function):
    """Gradients, as they are, which can't be differentiated."""

    @staticmethod
    def forward(_: Any, depends: Tensor, *gradients: Any) -> tuple[Any, ...]:  # noqa: ARG004
        return gradients

    @staticmethod
    def backward(*_: Any) -> None:
        raise ExecutionError(
            "what torch.compile made of a stage has no second derivative (create_graph=True): cut the model "
            "without compile="
        )


def _needs_no_frame(facts: Any) -> bool:
    """Whether AOTAutograd does nothing around a graph but to save, to lay out gradients, and to count what
    is written.
    """
    from torch._functorch._aot_autograd.schemas import MutationType, OutputType, PlainTensorMeta

    outputs = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.is_input)
    subclasses = [*facts.subclass_inp_meta, *facts.subclass_fw_graph_out_meta, *facts.subclass_tangent_meta]
    return (
        not facts.tokens
        and not facts.num_backward_tokens
        and not facts.is_rng_op_functionalized
        and not facts.num_graphsafe_rng_states
        and not facts.num_mutated_inp_runtime_indices
        and not facts.num_intermediate_bases
        and not facts.num_symints_saved_for_bw
        and not facts.num_opaque_objects_saved_for_bw
        and not facts.dynamic_outputs
        and not facts.dynamic_saved_tensors_idxs
        and facts.grad_enabled_mutation is None
        and all(isinstance(meta, PlainTensorMeta) for meta in subclasses)
        and all(info.output_type in outputs for info in facts.output_info)
        and all(info.mutation_type != MutationType.MUTATED_OUT_GRAPH for info in facts.input_info)
    )


def _has_tangent(info: Any) -> bool:
    needs: bool = getattr(info, "requires_grad_for_backward", info.requires_grad)
    return needs


def _detached(value: Tensor) -> Tensor:
    return value.detach() if value._is_view() else value
