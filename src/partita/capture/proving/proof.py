"""Proving that a captured graph equals its model: both run on the same samples, and everything is compared.

A capture can be wrong without an error: the tracer takes another branch than the eager model, loses a custom
backward, or keeps a number that depends on data. Only a comparison with the eager model shows that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.containers.pytree import flatten
from partita._torch.export.open_sizes import is_symbolic
from partita._torch.graph_module.lazy_module import generate_code
from partita._torch.tensors.free_memory import too_little
from partita._torch.tensors.storage import has_memory
from partita.capture.merging.modes import in_mode
from partita.capture.open_sizes.sizes import Sizes, sizes_of
from partita.capture.proving.differing_node import differing_node
from partita.capture.proving.grad_modes import (
    NOT_KEPT,
    GradModeDifference,
    difference_without_gradients,
    refuse_without_gradients,
)
from partita.capture.proving.kept_state import attributes_set, called_before
from partita.capture.proving.samples import Sample, samples, single_samples
from partita.errors import ArgumentError
from partita.graph.effects import metadata
from partita.listing import listed
from partita.verification import Verification, verify
from partita.verification.comparing.compare import EXACT, Tolerance

__all__ = [
    "CLOSE",
    "UNASKED",
    "Disproof",
    "KeepsState",
    "Proof",
    "Prove",
    "prove_batch_of_one",
    "proven",
    "tolerance_of",
]

CLOSE = Tolerance(rtol=1e-4, atol=1e-5)
"""What ``prove="close"`` accepts."""

_NUDGE = 1.0625
_SHOWN = 3

Prove = bool | Literal["close"] | Tolerance
"""True: equal bit for bit; ``"close"``: within `CLOSE`; or within a tolerance; False: no proof."""


@dataclass(frozen=True)
class Proof:
    """The outcome of proving a captured graph.

    Attributes:
        holds: whether the graph was compared with the eager model and was equal.
        text: what was compared, or why nothing was.
        unkept: attributes that the model's ``forward`` sets and the graph does not; a second call was equal.
        without_gradients: how the two differ in evaluation under ``torch.no_grad()``, if they do. More than
            by rounding: the graph refuses to run there.
    """

    holds: bool
    text: str
    unkept: tuple[str, ...] = ()
    without_gradients: str = ""

    def __str__(self) -> str:
        text = f"{'proven' if self.holds else 'not proven'}: {self.text}"
        if self.unkept:
            text += f"; without {listed(self.unkept)}, which forward sets: two calls in a row did not differ"
        return f"{text}; but {self.without_gradients}" if self.without_gradients else text


UNASKED = Proof(False, "it was not asked for")


class Disproof(Exception):
    """A captured graph differs from the model. The text names the sample, the difference and the node.

    Attributes:
        training: the mode in which they differ.
    """

    def __init__(self, training: bool, text: str) -> None:
        super().__init__(text)
        self.training = training


class KeepsState(Disproof):
    """A model's call depends on the one before through what no graph keeps."""


def tolerance_of(prove: Prove) -> Tolerance | None:
    """Return the tolerance for ``prove``; None where nothing is to be proven.

    Raises:
        ArgumentError: another value.
    """
    if isinstance(prove, Tolerance):
        return prove
    if prove == "close":
        return CLOSE
    if prove is True or prove is False:
        return EXACT if prove else None
    raise ArgumentError(
        f'prove is {prove!r}: give True (bit for bit), "close", a Tolerance(rtol=..., atol=...), or False'
    )


def proven(
    model: nn.Module,
    graphs: Mapping[bool, GraphModule],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tolerance: Tolerance | None,
) -> Proof:
    """Compare graphs with their model: outputs, gradients of parameters and inputs, buffers, random numbers.

    Args:
        graphs: by mode; the same one twice where one serves both.
        args: of the example.
        kwargs: of the example.
        tolerance: None: nothing is compared.

    Raises:
        Disproof: they differ.
    """
    if tolerance is None:
        return UNASKED
    reason = _obstacle(model, graphs, args, kwargs)
    if reason:
        return Proof(False, reason)
    seen: list[str] = []
    unkept: dict[str, None] = {}
    apart: list[GradModeDifference] = []
    for training, graph in graphs.items():
        generate_code(graph)  # for all of its copies
        names = [node.name for node in graph.graph.find_nodes(op="placeholder", sort=True)]
        for sample in samples(args, kwargs, Sizes.of(graph), names):
            nudged = _nudged(model) if sample.other_weights else nullcontext()
            with in_mode(model, training), in_mode(graph, training), nudged:
                outcome = _compared_in_a_row(model, graph, graphs.get(not training), sample, tolerance)
                if isinstance(outcome, _Equal) and not training:
                    differs = difference_without_gradients(model, graph, outcome.sample, tolerance, CLOSE)
                    apart += [differs] if differs else []
            if isinstance(outcome, Proof):
                return outcome
            if isinstance(outcome, _Keeps):  # the mode that the model is in is served, if one can be
                raise KeepsState(not model.training if outcome.across_modes else training, outcome.text)
            if isinstance(outcome, str):
                raise Disproof(training, f"on {outcome}")
            if isinstance(outcome, _Equal):
                seen.append(outcome.sample.kind)
                unkept |= dict.fromkeys(outcome.unkept)
            elif sample.gentle is None:
                mode = "training" if training else "evaluation"
                return Proof(False, f"on its own example, in {mode}, {outcome.why}")
    kinds = ", ".join(dict.fromkeys(seen))
    exact = "bit for bit" if tolerance.exact else f"within rtol={tolerance.rtol:g}, atol={tolerance.atol:g}"
    modes = " and ".join("training" if training else "evaluation" for training in graphs)
    gravest = min(apart, key=lambda one: one.rounding, default=None)
    if gravest is not None and not gravest.rounding:
        for graph in {id(graph): graph for graph in graphs.values()}.values():
            refuse_without_gradients(graph, gravest)
    text = f"equal to the eager model {exact} in {modes} on {kinds}"
    return Proof(True, text, tuple(unkept), gravest.text if gravest else "")


def prove_batch_of_one(
    model: nn.Module,
    graphs: Mapping[bool, GraphModule],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    proof: Proof,
    tolerance: Tolerance | None,
) -> None:
    """Let the graphs take a batch of one if they equal the model for one; see `Condition.strict`.

    Else they get the model's own, strict conditions, in place.

    Args:
        proof: of the graphs.
        tolerance: of that proof.

    Raises:
        Disproof: the example is a batch of one, and there is no proof for that.
    """
    if not any(Sizes.of(graph).waived for graph in graphs.values()):
        return
    shown = proof.holds and all(
        _is_model_for_one(model, training, graph, args, kwargs, tolerance)
        for training, graph in graphs.items()
    )
    flat = flatten((args, dict(kwargs)))[0]
    for training, graph in graphs.items():
        if shown:
            Sizes.of(graph).with_one().attach(graph)
            continue
        sizes = Sizes.of(graph).strictly()
        names = [node.name for node in graph.graph.find_nodes(op="placeholder", sort=True)]
        at = sizes_of(sizes.symbols, names, flat)
        for condition in sizes.conditions:
            if not condition.holds(at):
                raise Disproof(training, f"the example does not meet {condition.text}: {condition.where}")
        sizes.attach(graph)


def _is_model_for_one(
    model: nn.Module,
    training: bool,
    graph: GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tolerance: Tolerance | None,
) -> bool:
    sizes = Sizes.of(graph)
    if not sizes.waived:
        return True
    if tolerance is None:
        return False
    names = [node.name for node in graph.graph.find_nodes(op="placeholder", sort=True)]
    for sample in single_samples(args, kwargs, sizes, names):
        nudged = _nudged(model) if sample.other_weights else nullcontext()
        with in_mode(model, training), in_mode(graph, training), nudged:
            if not isinstance(_compared(model, graph, sample, tolerance), _Equal):
                return False
    return True


@dataclass(frozen=True)
class _Equal:
    """Model and graph are equal on a sample, but for these attributes, which the graph lacks."""

    sample: Sample
    unkept: tuple[str, ...]


@dataclass(frozen=True)
class _Keeps:
    """The model keeps something that the graph does not, for its next call, of this mode or of the other."""

    text: str
    across_modes: bool = False


@dataclass(frozen=True)
class _NotTaken:
    """The model, or the graph by an error of its own, refuses the sample."""

    why: str


def _compared_in_a_row(
    model: nn.Module, graph: GraphModule, other: GraphModule | None, sample: Sample, tolerance: Tolerance
) -> _Equal | _NotTaken | _Keeps | str | Proof:
    """Whether both are equal after the calls that come before the sample: one in the other mode, if there is
    a graph for that, and one in this mode. Where those fail, the sample alone tells.
    """
    outcome = _compared(model, graph, sample, tolerance, other)
    if isinstance(outcome, (_Equal, Proof)) or sample.before is None:
        return outcome
    if other is not None:
        in_this_mode = _compared(model, graph, sample, tolerance)
        if isinstance(outcome, str) and isinstance(in_this_mode, _Equal):
            with in_mode(model, not model.training):
                names = _attributes_set(model, sample)
            return _Keeps(_kept_text(names, "a call after one in the other mode", outcome), across_modes=True)
        outcome = in_this_mode
    alone = _compared(model, graph, sample.alone, tolerance)
    if isinstance(outcome, str) and isinstance(alone, _Equal):
        return _Keeps(_kept_text(_attributes_set(model, sample), "the second of two calls", outcome))
    return alone


def _compared(
    model: nn.Module,
    graph: GraphModule,
    sample: Sample,
    tolerance: Tolerance,
    other: GraphModule | None = None,
) -> _Equal | _NotTaken | str | Proof:
    """Whether both are equal; a text where they differ, a `Proof` that fails where none is possible."""
    # Compare.
    try:
        verification = _verify(graph, model, sample, tolerance, other)
    except TypeError as error:  # it runs copies
        return Proof(False, f"the model can't be copied ({error})")
    if verification.raised is not None:
        if sample.gentle:
            return _compared(model, graph, sample.gentle, tolerance, other)
        return _NotTaken(f"it raises {verification.raised}")
    differences = [one for one in verification.differences if one.kind not in NOT_KEPT]
    if not differences:
        attributes = [one.where for one in verification.differences if one.kind == "attribute"]
        return _Equal(sample, tuple(name.removeprefix("attribute ") for name in attributes))
    # One of the two may refuse the sample, or the model may not even equal itself.
    raised = next((one.message for one in differences if one.kind == "exception"), "")
    if _refused(raised):
        return _NotTaken(f"only one of graph and model raises: {raised}")
    if "candidate: none" in raised:  # the model does not take this sample, the graph does
        if sample.gentle:
            return _compared(model, graph, sample.gentle, tolerance, other)
        return _NotTaken(f"only one of graph and model raises: {raised}")
    again = _verify(model, model, sample, tolerance, None if other is None else model)
    if not again.ok and {one.where for one in differences} <= {one.where for one in again.differences}:
        return Proof(False, f"two runs of the model itself differ in {again.differences[0].where}")
    # Describe the differences.
    lines = [f"{sample.kind}: {one}" for one in differences[:_SHOWN]]
    if len(differences) > _SHOWN:
        lines.append(f"and {len(differences) - _SHOWN} more differences")
    nodes = [] if sample.before else differing_node(graph, model, sample, differences[0])
    return "\n    ".join([*lines, *nodes])


def _attributes_set(model: nn.Module, sample: Sample) -> list[str]:
    try:
        return attributes_set(model, sample)
    except Exception:  # they are not known then
        return []


def _kept_text(names: list[str], which: str, difference: str) -> str:
    where = f"in {listed(names)}, which forward sets" if names else "outside of its parameters and buffers"
    return (
        f"it keeps something for its next call {where}, which no graph does: {which} differs "
        f"({difference.splitlines()[0]}). Make it a buffer that forward writes to in place (register_buffer, "
        "then self.calls.add_(1))"
    )


def _verify(
    candidate: nn.Module, model: nn.Module, sample: Sample, tolerance: Tolerance, other: nn.Module | None
) -> Verification:
    """Compare on a sample, after the calls that come before it.

    Args:
        other: runs the first of these, in the mode that the candidate is not in; None: there is none.
    """
    before = sample.before
    return verify(
        called_before(candidate, other, *before) if before else candidate,
        called_before(model, None if other is None else model, *before) if before else model,
        sample.args,
        sample.kwargs,
        rtol=tolerance.rtol,
        atol=tolerance.atol,
        explain=False,
    )


def _refused(message: str) -> bool:
    """Whether the graph refused such data by an error of its own."""
    return "candidate: ExecutionError" in message or "candidate: SignatureMismatch" in message


@contextmanager
def _nudged(model: nn.Module) -> Iterator[None]:
    """Change the values of parameters and buffers: numbers that the trace read from them are wrong then."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    before = [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point()]
    try:
        for tensor, values in before:
            tensor.data = values * _NUDGE
        yield
    finally:
        for tensor, values in before:
            tensor.data = values


def _obstacle(
    model: nn.Module, graphs: Mapping[bool, GraphModule], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Why nothing can be compared; empty where it can."""
    state = [*model.parameters(), *model.buffers()]
    tensors = [*state, *(leaf for leaf in flatten((args, dict(kwargs)))[0] if isinstance(leaf, Tensor))]
    if not all(map(has_memory, tensors)):
        return "the model, or its example, is on the meta device or fake, and can't run"
    state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state)
    value_bytes = max(sum(_bytes(graph)) for graph in graphs.values())
    # two copies of the state with their gradients; values, and what autograd saves of them
    needed = 5 * state_bytes + 3 * value_bytes
    short = too_little(needed, (tensor.device for tensor in tensors))
    if short is None:
        return ""
    device, free = short
    return f"it would take about {needed >> 20:,} MiB on {device}, and {free >> 20:,} MiB are free"


def _bytes(graph: GraphModule) -> Iterator[int]:
    for node in graph.graph.nodes:
        value = metadata(node)
        if node.op.startswith("call_") and isinstance(value, torch.Tensor):
            elements = value.numel()
            if not is_symbolic(elements):  # else it depends on data
                yield elements * value.element_size()
