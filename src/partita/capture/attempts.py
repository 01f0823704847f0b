"""The ways of tracing one model, tried in order until one gives a graph that nothing speaks against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from partita._torch.export.conditions import Answers
from partita._torch.export.export import Way, export_module
from partita._torch.export.function_call import BackwardLost
from partita._torch.export.open_sizes import fixed_as_int
from partita._torch.graph_module.example_values import copy_graph_module
from partita._torch.modules.registered_state import register_missing
from partita.capture.merging.branches import Traced, all_ways, has_answers_of_the_example
from partita.capture.merging.modes import in_mode
from partita.capture.merging.other_mode import OtherMode
from partita.capture.merging.own_run import OwnRun
from partita.capture.open_sizes.batch import Example, examples
from partita.capture.open_sizes.sizes import Sizes
from partita.capture.open_sizes.specialise_sizes import specialise_sizes
from partita.capture.proving.proof import Disproof, KeepsState
from partita.capture.refusal import refusal
from partita.capture.tracing.blame import summary
from partita.capture.tracing.drawn_branches import check_drawn_branches
from partita.capture.tracing.host_draws import HostGenerators
from partita.capture.tracing.relative_regions import make_regions_relative
from partita.capture.tracing.unchanged import unchanged
from partita.errors import CaptureError, PartitaError

__all__ = ["Attempts"]

_WAYS: tuple[tuple[Way, ...], ...] = (("eager", "exportable"), ("strict",))
"""In the order in which they are tried. The ways of one group trace the same graph, if they can."""

_Attempt = tuple[Way, Example]
"""A way of tracing, and what is traced with."""


class _FixedAsInt(CaptureError):
    """Python asks for an open size as an integer: reading the bytecode may keep it open."""


class _SizesClosed(CaptureError):
    """A graph was traced, and is not for other sizes: nor is what another way of tracing gives."""


@dataclass(frozen=True)
class Attempts:
    """Exports one model with one example, in either mode.

    Attributes:
        provable: whether the graphs will be proven to be equal to the model.
        both: whether both modes are captured.
        used: the last attempt that worked, by mode.
        traced: by mode and attempt, the graph or why there is none. The disproof of one leaves all others.
        rejected: by mode, the ways of tracing whose graphs differ from the model, and whether sizes are open.
        hopeless: why no way of tracing gives the model, by mode.
        same_in_both: whether the model makes the same calls in evaluation as in every trace in training, by
            attempt.
        known_answers: the answers that the model got in earlier runs, which it is likely to get again; see
            `all_ways`.
        open_examples: the examples with an open batch, by the inputs whose sizes stay closed.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    provable: bool = False
    both: bool = False
    used: dict[bool, _Attempt] = field(default_factory=dict)
    traced: dict[tuple[bool, _Attempt], GraphModule | Exception] = field(default_factory=dict)
    rejected: dict[tuple[bool, Way, bool], Disproof] = field(default_factory=dict)
    hopeless: dict[bool, KeepsState] = field(default_factory=dict)
    same_in_both: dict[_Attempt, bool] = field(default_factory=dict)
    known_answers: dict[str, list[bool]] = field(default_factory=dict)
    open_examples: dict[frozenset[int], list[Example]] = field(default_factory=dict)

    @property
    def own_run(self) -> OwnRun:
        """The model's own run of the example."""
        return OwnRun(self.model, self.args, self.kwargs)

    @cached_property
    def fixed_example(self) -> Example:
        """The example with the sizes that the caller wants open; by default none."""
        return Example(self.args, self.kwargs, None if self.dynamic_shapes is False else self.dynamic_shapes)

    def reject(self, disproof: Disproof) -> None:
        """Do not use the attempt again that led to a graph which differs from the model."""
        if isinstance(disproof, KeepsState):
            self.hopeless[disproof.training] = disproof
        self.rejected[disproof.training, *_kind(*self.used[disproof.training])] = disproof

    def export_both(self) -> tuple[dict[bool, GraphModule], str]:
        """Export in both modes with the same sizes open; return the graphs by mode, and why one is missing.

        Raises:
            CaptureError: the model's own mode can't be captured.
        """
        closed: frozenset[int] = frozenset()
        while True:
            graphs: dict[bool, GraphModule] = {}
            reason = ""
            for training in (True, False):
                if not training and self._serves_evaluation(graphs):
                    graphs[False], self.used[False] = graphs[True], self.used[True]
                    continue
                try:
                    graphs[training] = self.export(training, closed)
                except CaptureError as error:
                    if training is self.model.training:
                        raise
                    reason = str(error)
            still = self._open_in_one_mode_only(graphs)
            if not still:
                return graphs, reason
            closed |= still

    def _serves_evaluation(self, graphs: Mapping[bool, GraphModule]) -> bool:
        attempt = self.used.get(True)
        if True not in graphs or attempt is None or (False, *_kind(*attempt)) in self.rejected:
            return False
        return self.same_in_both.get(attempt, False)

    def _open_in_one_mode_only(self, graphs: Mapping[bool, GraphModule]) -> frozenset[int]:
        if self.dynamic_shapes is not None or len(graphs) < 2:
            return frozenset()
        train, evaluation = (_open_inputs(graphs[training]) for training in (True, False))
        return train ^ evaluation

    def export(self, training: bool, closed: frozenset[int] = frozenset()) -> GraphModule:
        """Export in one mode, the first way that works.

        Raises:
            CaptureError: none does; with the reasons.
        """
        if training in self.hopeless:
            raise CaptureError(refusal(self.model, training, [("eager", self.hopeless[training])]))
        reasons: list[tuple[Way, Exception]] = []
        fixed = ""
        left = [(ways, example) for ways in _WAYS for example in self._examples(closed)]
        while left:
            ways, example = left.pop(0)
            module, failed = self._export_one_of(ways, example, training, fixed)
            if module is not None:
                return module
            first = failed[0][1]
            if isinstance(first, BackwardLost):
                raise CaptureError(refusal(self.model, training, failed[:1])) from first
            if not reasons and not fixed and not isinstance(first, (PartitaError, Disproof)):
                self.own_run.check(training)
            if isinstance(first, _FixedAsInt):  # reading the bytecode with open sizes comes next
                left.sort(key=lambda one: one[0] != ("strict",) or one[1].dynamic_shapes is None)
            if example.dynamic_shapes is None or self.dynamic_shapes is not None:
                reasons.append(failed[0])  # it comes from the lines that the model's user knows
            else:
                fixed = fixed or summary(first)
        raise CaptureError(refusal(self.model, training, reasons)) from reasons[0][1]

    def _export_one_of(
        self, ways: tuple[Way, ...], example: Example, training: bool, fixed: str
    ) -> tuple[GraphModule | None, list[tuple[Way, Exception]]]:
        """Export in the first of some ways that works; return None and the reasons where none does.

        Args:
            fixed: why sizes that should be open were not, in the attempts before.
        """
        failed: list[tuple[Way, Exception]] = []
        for way in ways:
            if (disproof := self.rejected.get((training, *_kind(way, example)))) is not None:
                failed.append((way, disproof))
                continue
            module = self._traced(way, example, training)
            if isinstance(module, Exception):
                failed.append((way, module))
                if isinstance(module, _SizesClosed):
                    break
                continue
            sizes = Sizes.of(module)
            replace(sizes, fixed=sizes.fixed or ("" if sizes.symbols else fixed)).attach(module)
            self.used[training] = way, example
            return module, failed
        return None, failed

    def _examples(self, closed: frozenset[int]) -> list[Example]:
        if self.dynamic_shapes is not None:
            return [self.fixed_example]
        if closed not in self.open_examples:
            self.open_examples[closed] = list(examples(self.args, self.kwargs, closed))
        return [*self.open_examples[closed], self.fixed_example]

    def _traced(self, way: Way, example: Example, training: bool) -> GraphModule | Exception:
        """Trace all ways through the model in one mode; return the graph, or why there is none.

        Raises:
            CaptureError: no graph of any attempt would be the model.
        """
        key = training, (way, example)
        if key not in self.traced:
            self.traced[key] = self._trace_all(way, example, training)
        traced = self.traced[key]
        # what is returned will be changed, and without a proof nobody asks again
        return copy_graph_module(traced) if self.provable and isinstance(traced, GraphModule) else traced

    def _trace_all(self, way: Way, example: Example, training: bool) -> GraphModule | Exception:
        trace = partial(self._trace, example, training, way)
        if training:
            self.same_in_both[way, example] = self.both
        generators = HostGenerators(self.model)
        try:
            module, sizes = all_ways(trace, partial(self._answers, training), self.known_answers)
            sizes.attach(module)
        except Exception as error:  # torch.export raises dozens of kinds
            return error
        else:
            generators.check(partial(trace, Answers()))
        finally:
            generators.reset()
        check_drawn_branches(self.model, module)
        if training and has_answers_of_the_example(module):  # another one in evaluation, maybe
            self.same_in_both[way, example] = False
        return module

    def _trace(self, example: Example, training: bool, way: Way, answers: Answers) -> Traced:
        """Trace one way through the model, with these answers where it branches on data."""
        other = OtherMode(self.model, other=False) if training and self.both else None
        with unchanged(self.model), torch.enable_grad(), in_mode(self.model, training):
            module = export_module(
                self.model,
                example.args,
                example.kwargs,
                way=way,
                dynamic_shapes=example.dynamic_shapes,
                answers=answers,
                watch=other,
            )
        if other is not None:
            self.same_in_both[way, example] &= other.same
        register_missing(self.model, module)  # reading the bytecode leaves out buffers that nothing uses
        make_regions_relative(module)
        traced = Traced(module, Sizes(), answers)
        tries_open = example.dynamic_shapes is not None and self.dynamic_shapes is None
        # What is read from the bytecode may be what the model does for exporters only: that needs a proof.
        if tries_open and way != "strict" and self.provable and (line := fixed_as_int(module)):
            raise _FixedAsInt(line)
        try:
            sizes = specialise_sizes(module, Example(self.args, self.kwargs).flat, provable=self.provable)
        except CaptureError as error:
            raise _SizesClosed(str(error)) from error
        if tries_open and not sizes.symbols:
            # then capture it with fixed sizes, which gives exactly this graph
            raise _SizesClosed(sizes.fixed or "no size of the batch stayed open")
        return replace(traced, sizes=sizes)

    def _answers(self, training: bool) -> dict[str, list[bool]] | None:
        answers = self.own_run.answers(training)
        self.known_answers.update(answers or {})
        return answers


def _kind(way: Way, example: Example) -> tuple[Way, bool]:
    return way, example.dynamic_shapes is not None


def _open_inputs(module: GraphModule) -> frozenset[int]:
    """Positions of the inputs whose first dimension is open."""
    shapes = Sizes.of(module).shapes
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    return frozenset(position for position, name in enumerate(names) if name in shapes)
