"""What has been compiled, so that equal graphs are compiled once."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from partita._torch.autograd.compiled_node import mark
from partita._torch.compile.aot import AotGraph, Boxed, boxed, reported_strides, takes_a_list
from partita._torch.compile.direct_graph import DirectGraph
from partita._torch.compile.inductor import configuration_hash, kernel_settings
from partita._torch.compile.refusal import check_margin_losses, failure_text
from partita._torch.compile.training_graphs import GraphCompiler, compile_training
from partita.errors import NotCompiled
from partita.graph.structure import structural_hash
from partita.pipelining.compiled.ahead import CompiledAhead, ahead_now
from partita.pipelining.compiled.backward_graph import copied, gradients_of
from partita.pipelining.compiled.backward_runner import BackwardRunner
from partita.pipelining.compiled.direct_calls import note_call
from partita.pipelining.compiled.stateless import STATE
from partita.pipelining.interface.compile_options import CompileOptions
from partita.runtime.graph_compiler import graph_as_it_is, resolve_inner, runs_by_operator
from partita.runtime.rng import first_site

__all__ = ["Artifacts", "artifacts_for"]

_STATE_NUMBER = re.compile(rf"_{STATE}(\d+)")


class Artifacts:
    """What one kind of options has compiled in this process: forward graphs, evaluation graphs, B, I and W.

    Attributes:
        options: what it was compiled with.
        hands_on: whether what its graphs return is let go of when the microbatch has been through the stage:
            a hint for a `PieceRunner`.
        compiled: how many graphs were compiled; equal ones count once.
        functions: the functions of stages, by their hashes.
    """

    def __init__(self, options: CompileOptions, *, hands_on: bool = False) -> None:
        self.options = options
        self.hands_on = hands_on
        self.compiled = 0
        self.functions: dict[str, Callable[..., Any]] = {}
        self._graphs: dict[tuple[Any, ...], tuple[Boxed, list[Any]]] = {}

    def backend(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend for ``torch.compile`` of a stage. Only what it has compiled runs in halves: the stance
        (``torch.compiler.set_stance``) may let another backend compile.
        """
        check_margin_losses(gm)
        numbers = [_STATE_NUMBER.search(str(node.target)) for node in gm.graph.find_nodes(op="placeholder")]
        state = [
            place
            for place, (number, value) in enumerate(zip(numbers, inputs, strict=True))
            if number or isinstance(value, torch.nn.Parameter)
        ]
        ahead = ahead_now()
        if ahead is not None:
            early = [number is not None and int(number[1]) in ahead.early_state for number in numbers]
            ahead.early_inputs = frozenset(
                place
                for place, value in enumerate(inputs)
                if early[place] or (place not in state and getattr(value, "requires_grad", False))
            )
        direct = DirectGraph(first_site)
        run = compile_training(
            gm,
            inputs,
            partial(self._compile, direct),
            inner=resolve_inner(self.options.backend),
            settings=self.options.settings(),
            static_positions=state,
            by_operator=runs_by_operator(self.options.backend),
            backward_too=ahead is not None,
        )

        def run_marked(*values: Any) -> Any:
            if ahead_now() is not None:
                raise CompiledAhead
            results = run(*values)
            if torch.is_grad_enabled():
                mark(results, first_site())
            note_call(direct, values, results)
            return results

        return run_marked

    def _compile(self, direct: DirectGraph, graph: AotGraph, compiler: GraphCompiler) -> Boxed:
        if graph.kind != "backward":
            run = self._compiled(replace(graph, returned=0) if self.hands_on else graph, compiler)
            direct.add_forward(graph, run)
            return run
        runner = BackwardRunner(
            graph, lambda piece: self._compiled(piece, compiler), fuses=self.options.backend == "inductor"
        )
        ahead = ahead_now()
        if ahead is not None:
            ahead.runners.append(runner)
        gradients = gradients_of(graph.gm)
        direct.add_backward(runner, [place for place, value in enumerate(gradients) if value is None])
        return takes_a_list(runner)

    def _compiled(self, graph: AotGraph, compiler: GraphCompiler) -> Boxed:
        if not self.options.shares:
            self.compiled += 1
            return _run_of(graph, compiler)
        names = [node.name for node in graph.gm.graph.find_nodes(op="placeholder")]
        static = tuple(place for place, name in enumerate(names) if name in graph.static_inputs)
        key = (
            graph.kind,
            graph.returned,
            static,
            structural_hash(graph.gm.graph, graph.gm),
            kernel_settings(),
        )
        strides = reported_strides() if graph.kind != "backward" else None
        before = 0 if strides is None else len(strides)
        if key in self._graphs:
            run, reported = self._graphs[key]
            if strides is not None:
                strides.extend(reported)  # AOTAutograd reads how the forward graph lays out what it saves
            return run
        self.compiled += 1
        run = _run_of(graph, compiler)
        self._graphs[key] = run, [] if strides is None else strides[before:]
        return run


def _run_of(graph: AotGraph, compiler: GraphCompiler) -> Boxed:
    """What the compiler makes of a graph. Where it fails at a forward graph, torch says so, and the whole
    stage runs as it is. A backward graph is compiled in a backward pass, too late for that, and runs as it
    was traced.
    """
    if graph.kind != "backward":
        return compiler(graph)
    traced = replace(graph, gm=copied(graph.gm))  # a compiler may change what it is given
    try:
        return compiler(graph)
    except Exception as error:  # as torch does with what compiles a forward graph
        why = failure_text(error)
    warnings.warn(
        f"a stage's backward graph runs uncompiled, with the same results: {why}", NotCompiled, stacklevel=2
    )
    return boxed(graph_as_it_is(traced))


_ALL: weakref.WeakValueDictionary[tuple[Any, ...], Artifacts] = weakref.WeakValueDictionary()


def artifacts_for(options: CompileOptions, *, hands_on: bool = False) -> Artifacts:
    """The artifacts of this process for such options and torch's present configuration; those of a
    `PieceRunner` are new each time.

    Args:
        hands_on: see `Artifacts`.
    """
    if not options.shares:
        return Artifacts(options, hands_on=hands_on)
    key = (*options.key, configuration_hash())
    artifacts = _ALL.get(key)
    if artifacts is None:
        artifacts = _ALL[key] = Artifacts(options)
    return artifacts
