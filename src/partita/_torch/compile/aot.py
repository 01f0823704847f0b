"""AOTAutograd as the frame of a backend: a record of each graph that it makes, given to one function."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from partita._torch.compile.eager_draws import calls_native_dropout, draw_as_eager
from partita._torch.compile.gradient_layouts import (
    lay_out_operands,
    may_lie_anywhere,
    take_gradients_as_they_lie,
)
from partita._torch.compile.interpolation import interpolation_of_kernels
from partita._torch.compile.kernel_strides import strides_of_kernels
from partita._torch.compile.views_without_gradient import keep_from_gradient, results_without_gradient
from partita._torch.containers.replaced import replaced

__all__ = [
    "AotGraph",
    "AotGraphKind",
    "AotRecords",
    "Boxed",
    "boxed",
    "compile_ahead",
    "copy_where_no_view",
    "no_donated_buffers",
    "reported_strides",
    "save_what_runs_once",
    "takes_a_list",
]

AotGraphKind: TypeAlias = Literal["forward", "backward", "inference"]

Boxed: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Takes its inputs in a list, which it empties, so that what is used up can be freed."""


@dataclass(frozen=True, eq=False)
class AotGraph:
    """One flat functional graph of operators. Writes to inputs stay in it, as ``copy_`` at its end.

    Attributes:
        kind: what AOTAutograd made it for.
        gm: the graph; its nodes have example values.
        examples: its example inputs (fake tensors and sizes).
        static_inputs: names of the parameters and buffers among its inputs, which keep their addresses from
            run to run; a backward graph names those of its forward graph.
        returned: how many of its outputs a caller gets; those behind them are saved, and only the backward
            graph reads them. None: all are returned.
        forward_tensors: positions of the tensors among the inputs of the forward graph, which is this one or
            that of a backward graph; tokens that keep effects in order are not counted.
        kept_in_place: names of the saved values that lie at the same address in each run. Who compiles a
            forward graph adds them; its backward graph has the same set.
    """

    kind: AotGraphKind
    gm: GraphModule
    examples: tuple[Any, ...]
    static_inputs: frozenset[str]
    returned: int | None
    forward_tensors: tuple[int, ...]
    kept_in_place: set[str]

    def piece(self, gm: GraphModule, returned: int | None = None) -> AotGraph:
        """A graph that was cut from this one. Its outputs have the strides that the example values say.

        Args:
            returned: how many of its outputs are kept for long; those behind them another piece reads.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        names = {node.name for node in placeholders}
        examples = tuple(node.meta["val"] for node in placeholders)
        static_inputs = self.static_inputs & names
        return replace(self, gm=gm, examples=examples, static_inputs=static_inputs, returned=returned)


class AotRecords:
    """Makes the records of the graphs that come from one graph of Dynamo's, while torch compiles them.

    It lives as long as what is compiled: of the forward graph it keeps names and positions, not the graph.

    Args:
        static_positions: of the inputs that are parameters or buffers, besides those that Dynamo sees.
    """

    def __init__(self, static_positions: Sequence[int] = ()) -> None:
        self._static_positions = tuple(static_positions)
        self._static: set[str] = set()
        self._forward_tensors: tuple[int, ...] = ()
        self._kept_in_place: set[str] = set()

    def graph(self, kind: AotGraphKind, gm: GraphModule, examples: Sequence[Any]) -> AotGraph:
        """The record of the graph that is being compiled."""
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        context = TracingContext.try_get()
        facts = None if context is None else context.fw_metadata
        # tokens, which keep effects in order, stand before a forward graph's inputs and have no gradient
        tokens = 0 if facts is None else len(facts.tokens)
        if kind != "backward":
            inputs = names[tokens:]
            self._static.update(inputs[index] for index in self._static_positions if index < len(inputs))
        if kind != "backward" and facts is not None:
            self._static.update(names[index] for index in facts.static_input_indices if index < len(names))
        returned = getattr(facts, "num_forward", None) if kind == "forward" else None
        if kind != "backward":
            tensors = (isinstance(value, torch.Tensor) for value in examples[tokens:])
            self._forward_tensors = tuple(position for position, yes in enumerate(tensors) if yes)
        static_inputs = frozenset(self._static.intersection(names))
        forward = (self._forward_tensors, self._kept_in_place)
        return AotGraph(kind, gm, tuple(examples), static_inputs, returned, *forward)


def compile_ahead(
    gm: GraphModule,
    inputs: Sequence[Any],
    compile_graph: Callable[[AotGraph], Callable[..., Any]],
    static_positions: Sequence[int] = (),
    *,
    by_operator: bool = False,
) -> Callable[..., Any]:
    """Give the forward, backward and inference graphs of a Dynamo graph to ``compile_graph``.

    A graph that runs operator by operator is given its gradients as they lie (see `gradient_layouts`), and
    draws as eager mode does (`draw_as_eager`).

    Args:
        inputs: those that Dynamo hands to a backend.
        compile_graph: returns what runs a graph: a function of its inputs, called without gradients; one that
            `takes_a_list` is called as it is.
        static_positions: see `AotRecords`.
        by_operator: whether what runs a graph takes inputs with other strides than those of the examples.

    Returns:
        A function of the same inputs.
    """
    from torch._dynamo.backends.common import aot_autograd  # half a second, for who compiles

    recorder = AotRecords(static_positions)
    without_gradient = results_without_gradient(gm)
    anywhere = False
    draws_as_eager = by_operator and not calls_native_dropout(gm)

    def partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        nonlocal anywhere
        anywhere = by_operator and may_lie_anywhere(joint)
        return _partition(joint, inputs, **options)

    def compiler(kind: AotGraphKind) -> Callable[[GraphModule, Sequence[Any]], Boxed]:
        def compile_one(gm: GraphModule, examples: Sequence[Any]) -> Boxed:
            copy_where_no_view(gm)
            if draws_as_eager:
                draw_as_eager(gm)
            if kind == "forward" and anywhere:
                take_gradients_as_they_lie()
            if kind == "backward" and anywhere:
                lay_out_operands(gm)
            return boxed(compile_graph(recorder.graph(kind, gm, examples)))

        return compile_one

    with no_donated_buffers(), ExitStack() as kernels:
        if by_operator:
            kernels.enter_context(strides_of_kernels())
            kernels.enter_context(interpolation_of_kernels())
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(gm, inputs)
    return keep_from_gradient(compiled, without_gradient)


@contextmanager
def no_donated_buffers() -> Iterator[None]:
    """In this block, no backward graph is compiled that may overwrite saved values. Those are listed for the
    whole graph; a piece would take the numbers for those of its own inputs.

    Each compiled graph says that it has none. Torch leaves the list out (None) where it does not look for
    them, and a backward pass that keeps the graph is refused for every list that is not empty, None too.
    """
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta  # for who compiles

    before = ViewAndMutationMeta.__post_init__

    def has_none(facts: Any) -> None:
        before(facts)
        facts.bw_donated_idxs = []

    with (
        functorch_config.patch(donated_buffer=False),
        replaced(ViewAndMutationMeta, "__post_init__", has_none),
    ):
        yield


def copy_where_no_view(gm: GraphModule) -> None:
    """Let each view of a functional graph be a copy where the strides at run do not allow a view.

    The graph was traced on example values, and some of torch's kernels (``native_batch_norm`` of a transposed
    input, the backward passes of dropout and softplus) lay out their results in another way than those say.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    gm.recompile()


def _partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Torch's partition of a joint graph."""
    from torch._functorch.partitioners import default_partition

    save_what_runs_once(joint)
    return default_partition(joint, inputs, **options)


def save_what_runs_once(joint: GraphModule, *, may_recompute: bool = False) -> None:
    """Where regions are recomputed, let what draws random numbers or has another effect run once, in place: a
    second draw would have to be seeded like the first. What the forward graph writes to is recomputed from as
    it was before: torch would save the input, which is written by then.

    Args:
        may_recompute: the partition recomputes what it likes, outside of such regions too.
    """
    nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
    has_regions = any("recompute" in node.meta for node in nodes)
    if has_regions or may_recompute:
        _save_before_written(joint)
    if has_regions:
        for node in nodes:
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if draws or node.is_impure(impure_random=False):
                parts = (user for user in node.users if user.target is operator.getitem)
                for one in (node, *parts):
                    one.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _save_before_written(joint: GraphModule) -> None:
    """Let all that is computed from an input to which a joint graph writes at its end (a buffer) be computed
    from a copy, in place; the copy is what is saved.
    """
    inputs = joint.graph.find_nodes(op="placeholder")
    for write in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written = write.args[0]
        if written not in inputs or len(written.users) == 1:
            continue
        with joint.graph.inserting_after(inputs[-1]):
            before = joint.graph.call_function(torch.ops.aten.clone.default, (written,))
        before.meta = {
            **written.meta,
            "val": written.meta["val"].clone(),  # in memory of its own, by which Inductor goes
            "partitioner_tag": "is_forward",
            "recompute": CheckpointPolicy.MUST_SAVE,
        }
        written.replace_all_uses_with(
            before, lambda user, write=write, before=before: user not in (write, before)
        )


def reported_strides() -> list[Any] | None:
    """Where the compiler of the forward graph that is being compiled says how it lays out its results, for
    the backward graph; None outside of AOTAutograd.
    """
    context = TracingContext.try_get()
    return None if context is None else context.output_strides


def boxed(run: Callable[..., Any]) -> Boxed:
    """``run`` with its inputs in a list, without gradients; itself where torch has marked it as such."""
    if getattr(run, "_boxed_call", False):
        return run

    def run_boxed(values: list[Any]) -> Sequence[Any]:
        taken = tuple(values)
        values.clear()
        if not torch.is_grad_enabled():  # nearly always: autograd runs its nodes so
            return run(*taken)
        with torch.no_grad():
            return run(*taken)

    run_boxed._boxed_call = True  # type: ignore[attr-defined]
    return run_boxed


def takes_a_list(run: Boxed) -> Boxed:
    """A function that AOTAutograd calls with a list, which it may empty."""

    def marked(values: list[Any]) -> Sequence[Any]:
        return run(values)

    marked._boxed_call = True  # type: ignore[attr-defined]
    return marked
