"""`capture`: a graph that runs like the model, in both modes, with the original names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule

from partita._torch.export.conditions import Answers
from partita._torch.export.export import Way, export_module
from partita._torch.export.open_sizes import fixed_as_int, forget_sizes
from partita._torch.export.signature import Signature, signature_of
from partita._torch.modules.registered_state import register_missing
from partita.capture.merging.branches import Traced, all_ways, has_answers_of_the_example
from partita.capture.merging.merge_modes import merge_modes
from partita.capture.merging.modes import captures_training, copy_flags, in_mode, mode_flag, require_mode
from partita.capture.merging.other_mode import OtherMode
from partita.capture.merging.own_run import OwnRun
from partita.capture.open_sizes.batch import Example, examples, traceable_arguments
from partita.capture.open_sizes.sizes import Sizes
from partita.capture.open_sizes.specialise_sizes import specialise_sizes
from partita.capture.proving.proof import (
    UNASKED,
    Disproof,
    KeepsState,
    Proof,
    Prove,
    prove_batch_of_one,
    proven,
    tolerance_of,
)
from partita.capture.refusal import check_call, refusal, short_refusal
from partita.capture.tracing.blame import summary
from partita.capture.tracing.drawn_branches import check_drawn_branches
from partita.capture.tracing.host_draws import HostGenerators
from partita.capture.tracing.relative_regions import make_regions_relative
from partita.capture.tracing.unchanged import unchanged
from partita.errors import CaptureError, PartitaError
from partita.verification.comparing.compare import Tolerance

__all__ = ["Captured", "Modes", "capture"]

Modes = Literal["both", "train", "eval"]


@dataclass(frozen=True)
class Captured:
    """A model as a graph.

    Attributes:
        module: runs like the model and has the same parameter and buffer objects under their original names;
            ``train()`` and ``eval()`` work on it and on its submodules. ``Sizes.of(module)`` has its open
            sizes.
        signature: how arguments become placeholders, and outputs the model's own structure.
        both_modes: whether one graph serves both modes. If not, it raises an error in the other one.
        other: the graph for the other mode, if that needs one of its own and could be captured.
        reason: why there is no graph for the other mode.
        proof: whether the graphs were proven to be equal to the model.
    """

    module: GraphModule
    signature: Signature
    both_modes: bool
    other: Captured | None = None
    reason: str = ""
    proof: Proof = UNASKED

    def graphs(self) -> dict[bool, GraphModule]:
        """Return the graphs by mode: True for training."""
        if self.both_modes:
            return {True: self.module, False: self.module}
        modules = [self.module] if self.other is None else [self.module, self.other.module]
        return {captures_training(module): module for module in modules}


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    modes: Modes = "both",
    prove: Prove = False,
) -> Captured:
    """Capture ``model`` with ``torch.export``; the model itself does not change.

    Args:
        args: example arguments.
        kwargs: example keyword arguments.
        dynamic_shapes: which sizes stay open, as for ``torch.export``. None: the first dimension of every
            tensor that has the size of the batch, where the model allows it; else the graph is for the
            example's sizes, and ``Sizes.of(module).fixed`` says why. False: none.
        modes: ``"train"`` or ``"eval"`` to capture one mode only, whatever mode the model is in.
        prove: compare the graphs with the model itself, on the example and on other samples of its kind; see
            `partita.capture.proving.proof`. Where they differ, another way of tracing is tried.

    Raises:
        CaptureError: ``torch.export`` can't trace the model, or what it traces is not the model; the message
            shows its reason, the line of the model, and what to do.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    >>> captured = capture(model, (torch.randn(1, 2),))
    >>> captured.both_modes
    True
    >>> captured.module(torch.randn(5, 2)).shape
    torch.Size([5, 2])
    """
    check_call(model, args)
    if modes not in ("both", "train", "eval"):
        raise CaptureError(f"modes is {modes!r}: give 'both', 'train' or 'eval'")
    tolerance = tolerance_of(prove)
    exporter = _Exporter(
        model,
        *traceable_arguments(args, kwargs or {}),
        dynamic_shapes,
        provable=tolerance is not None,
        both=modes == "both",
    )
    try:
        return _proven(exporter, modes, args, kwargs or {}, tolerance)
    finally:
        forget_sizes()


def _proven(
    exporter: _Exporter,
    modes: Modes,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tolerance: Tolerance | None,
) -> Captured:
    model = exporter.model
    while True:
        captured = _captured(exporter, modes)
        graphs = captured.graphs()
        try:
            proof = proven(model, graphs, args, kwargs, tolerance)
            prove_batch_of_one(model, graphs, args, kwargs, proof, tolerance)
        except Disproof as error:
            exporter.reject(error)
        else:
            return replace(captured, proof=proof)


def _captured(exporter: _Exporter, modes: Modes) -> Captured:
    model = exporter.model
    if modes != "both":
        reason = "only that mode was to be captured"
        return _single(model, exporter.export(modes == "train"), modes == "train", reason)
    graphs, reason = exporter.export_both()
    train, evaluation = graphs.get(True), graphs.get(False)
    if train is not None and evaluation is not None:
        sizes = Sizes.of(train).joined(Sizes.of(evaluation))
        if train is evaluation or merge_modes(train, evaluation, model):
            sizes.attach(train)
            copy_flags(model, train)
            return Captured(train, signature_of(train, model.forward), True)
    short = f"that mode can't be captured ({short_refusal(reason)})" if reason else ""
    by_mode = {training: _single(model, graph, training, short) for training, graph in graphs.items()}
    own = by_mode.get(model.training)
    if own is None:
        return next(iter(by_mode.values()))
    return replace(own, other=by_mode.get(not model.training), reason=reason)


def _single(model: nn.Module, module: GraphModule, training: bool, reason: str) -> Captured:
    """A graph for one mode, which checks the mode first."""
    flag = mode_flag(module, "")
    with module.graph.inserting_after(flag):
        module.graph.call_function(require_mode, (flag, training, reason))
    module.recompile()
    copy_flags(model, module)
    return Captured(module, signature_of(module, model.forward), False)


_WAYS: tuple[tuple[Way, ...], ...] = (("eager", "exportable"), ("strict",))
"""In the order in which they are tried. The ways of one group trace the same graph, if they can."""

_Attempt = tuple[Way, bool]
"""A way of tracing, and whether with open sizes."""


class _FixedAsInt(CaptureError):
    """Python asks for an open size as an integer: reading the bytecode may keep it open."""


@dataclass(frozen=True)
class _Exporter:
    """Exports one model with one example, in either mode.

    Attributes:
        provable: whether the graphs will be proven to be equal to the model.
        both: whether both modes are captured.
        used: the last attempt that worked, by mode.
        rejected: the attempts whose graphs differ from the model, by mode.
        hopeless: why no way of tracing gives the model, by mode.
        same_in_both: whether the model makes the same calls in evaluation as in every trace in training, by
            attempt.
        known_answers: the answers that the model got in earlier runs, which it is likely to get again; see
            `all_ways`.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    provable: bool = False
    both: bool = False
    used: dict[bool, _Attempt] = field(default_factory=dict)
    rejected: dict[tuple[bool, _Attempt], Disproof] = field(default_factory=dict)
    hopeless: dict[bool, KeepsState] = field(default_factory=dict)
    same_in_both: dict[_Attempt, bool] = field(default_factory=dict)
    known_answers: dict[str, list[bool]] = field(default_factory=dict)

    @property
    def own_run(self) -> OwnRun:
        """The model's own run of the example."""
        return OwnRun(self.model, self.args, self.kwargs)

    def reject(self, disproof: Disproof) -> None:
        """Do not use the attempt again that led to a graph which differs from the model."""
        if isinstance(disproof, KeepsState):
            self.hopeless[disproof.training] = disproof
        self.rejected[disproof.training, self.used[disproof.training]] = disproof

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
        if True not in graphs or attempt is None or (False, attempt) in self.rejected:
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
        generators = HostGenerators(self.model)
        for way in ways:
            attempt: _Attempt = (way, example.dynamic_shapes is not None)
            if (training, attempt) in self.rejected:
                failed.append((way, self.rejected[training, attempt]))
                continue
            trace = partial(self._trace, example, training, way)
            if training:
                self.same_in_both[attempt] = self.both
            try:
                module, sizes = all_ways(trace, partial(self._answers, training), self.known_answers)
            except Exception as error:  # torch.export raises dozens of kinds
                failed.append((way, error))
                generators.reset()
                continue
            try:
                generators.check(partial(trace, Answers()))
            finally:
                generators.reset()
            check_drawn_branches(self.model, module)
            replace(sizes, fixed=sizes.fixed or ("" if sizes.symbols else fixed)).attach(module)
            if training and has_answers_of_the_example(module):  # another one in evaluation, maybe
                self.same_in_both[attempt] = False
            self.used[training] = attempt
            return module, failed
        return None, failed

    def _examples(self, closed: frozenset[int]) -> Iterator[Example]:
        if self.dynamic_shapes is None:
            yield from examples(self.args, self.kwargs, closed)
        if self.dynamic_shapes is None or self.dynamic_shapes is False:
            yield Example(self.args, self.kwargs)
        else:
            yield Example(self.args, self.kwargs, self.dynamic_shapes)

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
            self.same_in_both[way, example.dynamic_shapes is not None] &= other.same
        register_missing(self.model, module)  # reading the bytecode leaves out buffers that nothing uses
        make_regions_relative(module)
        traced = Traced(module, Sizes(), answers)
        tries_open = example.dynamic_shapes is not None and self.dynamic_shapes is None
        # What is read from the bytecode may be what the model does for exporters only: that needs a proof.
        if tries_open and way != "strict" and self.provable and (line := fixed_as_int(module)):
            raise _FixedAsInt(line)
        sizes = specialise_sizes(module, Example(self.args, self.kwargs).flat, provable=self.provable)
        if tries_open and not sizes.symbols:
            # then capture it with fixed sizes, which gives exactly this graph
            raise CaptureError(sizes.fixed or "no size of the batch stayed open")
        return replace(traced, sizes=sizes)

    def _answers(self, training: bool) -> dict[str, list[bool]] | None:
        answers = self.own_run.answers(training)
        self.known_answers.update(answers or {})
        return answers


def _open_inputs(module: GraphModule) -> frozenset[int]:
    """Positions of the inputs whose first dimension is open."""
    shapes = Sizes.of(module).shapes
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    return frozenset(position for position, name in enumerate(names) if name in shapes)
