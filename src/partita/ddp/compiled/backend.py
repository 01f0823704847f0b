"""The backend for ``torch.compile``: one forward graph, and a backward graph that is cut where buckets are
ready.

::

    dynamo graph -- AOTAutograd --> forward     compiled as it is
                                    backward    cut_backward -> pieces, compiled one by one
                                                run: piece 0, offer its gradients, piece 1, ...
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from partita._torch.autograd.running_pass import compiled_nodes, current_node
from partita._torch.compile.aot import AotGraph, Boxed, takes_a_list
from partita._torch.compile.training_graphs import GraphCompiler, compile_training
from partita._torch.distributed.gradient_sync import in_forward_of_ddp
from partita._torch.tensors.versions import times_written
from partita.ddp.compiled.cutting import BackwardGraph, cut_backward
from partita.ddp.compiled.program import BackwardProgram, program_of
from partita.ddp.reducing.agreement import fingerprint_of
from partita.ddp.reducing.reducer import Reducer
from partita.ddp.replicas.replication import REPLICATIONS
from partita.errors import ReplicasDiffer
from partita.runtime import PieceRunner
from partita.runtime.graph_compiler import (
    inductors_settings,
    resolve_inner,
    runs_as_it_is,
    runs_by_operator,
)

__all__ = ["partita_ddp"]

_LOG = logging.getLogger("partita.ddp")

_NO_CUDA_GRAPHS = (
    "Inductor's CUDA graphs can't be cut where buckets are sent: pass "
    "inner=partita.cudagraphs.CudaGraphsRunner() to replicate(), or mode='max-autotune-no-cudagraphs' to "
    "torch.compile"
)


def partita_ddp(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend ``"partita_ddp"``, for modules that `partita.ddp.replicate` has prepared.

    A graph without parameters of such a module (a loss, what stands between graph breaks) is compiled as it
    is, with the compiler of the replicated module that the thread has used last. One that would compute
    other numbers (a margin loss of several classes) is not compiled; its gradients are reduced all the same.

    Args:
        mode: of Inductor, as in ``torch.compile``: ``"max-autotune-no-cudagraphs"``.
        options: ``{"inner": ...}``: another compiler than the one that ``replicate`` was given; and what
            Inductor's configuration has, such as ``{"max_autotune": True}``.

    Raises:
        ArgumentError: an unknown mode, option or compiler, or one that asks for Inductor's CUDA graphs.

    Warns:
        NotCompiled: a graph is not compiled.
        ReplicasDiffer: a graph trains a module that nobody has replicated, on several ranks.
    """
    settings = dict(options or {})
    owners = [REPLICATIONS.owner_of(value) for value in inputs]
    replication = next((owner[0] for owner in owners if owner is not None), REPLICATIONS.last_used())
    inner = settings.pop("inner", "inductor" if replication is None else replication.inner)

    if replication is None:
        _warn_of_own_gradients(inputs)
    if runs_as_it_is(gm):
        return gm.forward  # the gradients of its parameters arrive at their hooks

    expected: dict[int, tuple[Reducer, int]] = {}
    others: list[int] = []
    for position, owner in enumerate(owners):
        if owner is None:
            others.append(position)
        else:
            expected[position] = owner[0].reducer, owner[1]
    compiled_for = ", ".join(_described(inputs[position]) for position in others)

    def compile_graph(graph: AotGraph, compiler: GraphCompiler) -> Boxed:
        if graph.kind != "backward":
            return compiler(graph)
        shares = not isinstance(inner, PieceRunner)
        return takes_a_list(_BackwardRunner(graph, compiler, expected, compiled_for, shares=shares))

    run = compile_training(
        gm,
        inputs,
        compile_graph,
        inner=resolve_inner(inner),
        settings=inductors_settings(inner, mode, settings, name="inner", no_cuda_graphs=_NO_CUDA_GRAPHS),
        by_operator=runs_by_operator(inner),
    )
    tensors = [position for position in others if isinstance(inputs[position], torch.Tensor)]
    return _registering(run, tensors) if expected else run


def _warn_of_own_gradients(inputs: Sequence[Any]) -> None:
    """Warn where gradients of a graph would stay on their rank though there are others."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    trained = any(isinstance(value, nn.Parameter) and value.requires_grad for value in inputs)
    if ranks > 1 and trained and torch.is_grad_enabled() and not in_forward_of_ddp():
        warnings.warn(
            "a module that partita.ddp.replicate() has not prepared is compiled with partita_ddp, and its "
            f"gradients are not averaged: each of the {ranks} ranks trains a model of its own. Call "
            "replicate(module) before torch.compile()",
            ReplicasDiffer,
            stacklevel=2,
        )


def _registering(run: Callable[..., Any], others: Sequence[int]) -> Callable[..., Any]:
    """Let the reducers know of the autograd node of each run. It stands behind what the graph returns and
    what it has written to.

    Args:
        others: positions of the tensors that are no replicated parameters; the graph may write to them.
    """

    def registered(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args)
        before = [times_written(args[position]) for position in others]
        results = run(*args)
        written = [
            args[position]
            for position, count in zip(others, before, strict=True)
            if times_written(args[position]) != count
        ]
        reducers = {owner[0].reducer for owner in map(REPLICATIONS.owner_of, args) if owner is not None}
        outputs = list(results) if isinstance(results, (list, tuple)) else [results]
        for node in compiled_nodes([*outputs, *written]):
            for reducer in reducers:
                reducer.add_node(node)
        return results

    return registered


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    trained = " with a gradient" if value.requires_grad else ""
    return f"{value.dtype}{list(value.shape)}{trained}"


class _BackwardRunner:
    """Runs one backward graph, and offers its gradients to the reducers of their parameters.

    It is cut when it first runs, for by then all ranks have agreed on the buckets; and cut anew where the
    buckets have changed. A graph with symbolic sizes is cut when it is compiled, and stays as it is: torch
    would not hear of assumptions about sizes that are made later.

    Args:
        compiler: of the pieces.
        expected: for output positions, the reducer and the index of the parameter.
        compiled_for: the inputs that are no parameters, in words.
        shares: compile equal pieces once. What a piece runner makes is bound to its place (a recording to its
            parameters), and each piece gets its own.
    """

    def __init__(
        self,
        graph: AotGraph,
        compiler: GraphCompiler,
        expected: Mapping[int, tuple[Reducer, int]],
        compiled_for: str,
        *,
        shares: bool,
    ) -> None:
        self._shares = shares
        self._whole = graph
        self._graph = BackwardGraph(graph.gm)
        self._compiler = compiler
        self._compiled: dict[str, Boxed] = {}
        count = len(self._graph.outputs)
        # Autograd counts only those inputs of the forward graph that are tensors.
        self._tensors = [position for position in graph.forward_tensors if position < count]
        self._expected = {position: owner for position, owner in expected.items() if position < count}
        self._program: BackwardProgram | None = None
        self._versions: tuple[int, ...] = ()
        self._order = self._graph.in_order(self._expected)
        for reducer in self._reducers():
            names = [reducer.names[index] for index in self._order_for(reducer)]
            reducer.add_graph(fingerprint_of(graph.gm, names, compiled_for))
        self._symbolic = any(not isinstance(value, torch.Tensor) for value in graph.examples)
        if self._symbolic:
            self._cut()

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        bound = self._bind()
        for reducer in {reducer: None for reducer, _ in bound.values()}:
            indices = [index for other, index in bound.values() if other is reducer]
            if not reducer.begin(indices, self._order_for(reducer)):
                bound = {position: owner for position, owner in bound.items() if owner[0] is not reducer}
        if self._program is None or not (self._symbolic or self._versions == self._current()):
            self._cut()
        assert self._program is not None

        def deliver(position: int, value: Any) -> Any:
            owner = bound.get(position)
            return value if owner is None else owner[0].offer(owner[1], value)

        results = self._program.run(values, deliver)
        for position, (reducer, index) in bound.items():
            if self._graph.outputs[position] is None:
                results[position] = reducer.offer(index, None)
        return results

    def _bind(self) -> dict[int, tuple[Reducer, int]]:
        """The parameters that this run's gradients belong to: equal layers may share the graph."""
        node = current_node()
        if node is None:
            return {}
        bound: dict[int, tuple[Reducer, int]] = {}
        for reducer in self._reducers():
            indices = reducer.indices_after(node)
            if len(indices) != len(self._tensors):
                continue
            for position, index in zip(self._tensors, indices, strict=True):
                if index is not None:
                    bound[position] = (reducer, index)
        return bound

    def _reducers(self) -> list[Reducer]:
        return list({reducer: None for reducer, _ in self._expected.values()})

    def _order_for(self, reducer: Reducer) -> list[int]:
        owners = (self._expected[position] for position in self._order)
        return [index for other, index in owners if other is reducer]

    def _current(self) -> tuple[int, ...]:
        return tuple(reducer.version for reducer in self._reducers())

    def _cut(self) -> None:
        buckets = {
            position: (id(reducer), index if reducer.measuring else reducer.bucket_of[index])
            for position, (reducer, index) in self._expected.items()
        }
        cut = cut_backward(self._graph, buckets)
        self._versions = self._current()
        self._program = program_of(self._graph.gm, cut, self._compile_piece)
        _LOG.info(
            "backward graph of %d gradients: %d pieces, %d of them different",
            len(self._order),
            len(self._program.steps),
            len(self._compiled) or len(self._program.steps),
        )

    def _compile_piece(self, key: str, gm: GraphModule) -> Boxed:
        # the reducer copies the gradients, and the pieces behind read the rest: nobody keeps results
        graph = self._whole.piece(gm, returned=0)
        if not self._shares:
            return self._compiler(graph)
        if key not in self._compiled:
            self._compiled[key] = self._compiler(graph)
        return self._compiled[key]
