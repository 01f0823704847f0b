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
from partita._torch.tensors.subclasses import innermost_tensors
from partita.capture.merging.modes import in_mode
from partita.capture.open_sizes.sizes import Sizes, sizes_of
from partita.capture.proving.autocasts import keep_to_autocast
from partita.capture.proving.comparison import (
    Different,
    Equal,
    Keeps,
    NotComparable,
    compare,
    compare_in_a_row,
)
from partita.capture.proving.grad_modes import (
    GradModeDifference,
    difference_without_gradients,
    refuse_without_gradients,
)
from partita.capture.proving.samples import Sample, samples, single_samples
from partita.errors import ArgumentError
from partita.graph.effects import metadata
from partita.listing import listed
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
    "without_values",
]

CLOSE = Tolerance(rtol=1e-4, atol=1e-5)
"""What ``prove="close"`` accepts."""

_NUDGE = 1.0625

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
    equal_on: dict[GraphModule, tuple[bool, Sample]] = {}
    # Each mode on each sample. What is no proof ends it.
    for training, graph in graphs.items():
        generate_code(graph)  # for all of its copies
        names = [node.name for node in graph.graph.find_nodes(op="placeholder", sort=True)]
        for sample in samples(args, kwargs, Sizes.of(graph), names):
            nudged = _nudged(model) if sample.other_weights else nullcontext()
            with in_mode(model, training), in_mode(graph, training), nudged:
                outcome = compare_in_a_row(model, graph, graphs.get(not training), sample, tolerance)
                if isinstance(outcome, Equal) and not training:
                    differs = difference_without_gradients(model, graph, outcome.sample, tolerance, CLOSE)
                    apart += [differs] if differs else []
            if isinstance(outcome, NotComparable):
                return Proof(False, outcome.why)
            if isinstance(outcome, Keeps):  # the mode that the model is in is served, if one can be
                raise KeepsState(not model.training if outcome.across_modes else training, outcome.text)
            if isinstance(outcome, Different):
                raise Disproof(training, f"on {outcome.text}")
            if isinstance(outcome, Equal):
                seen.append(outcome.sample.kind)
                equal_on.setdefault(graph, (training, outcome.sample))
                unkept |= dict.fromkeys(outcome.unkept)
            elif sample.gentle is None:
                mode = "training" if training else "evaluation"
                return Proof(False, f"on its own example, in {mode}, {outcome.why}")
    kinds = ", ".join(dict.fromkeys(seen))
    exact = "bit for bit" if tolerance.exact else f"within rtol={tolerance.rtol:g}, atol={tolerance.atol:g}"
    modes = " and ".join("training" if training else "evaluation" for training in graphs)
    # Where it differs without gradients by more than rounding, the graph refuses to run so.
    gravest = min(apart, key=lambda one: one.rounding, default=None)
    if gravest is not None and not gravest.rounding:
        for graph in {id(graph): graph for graph in graphs.values()}.values():
            refuse_without_gradients(graph, gravest)
    # Where it differs under another autocast, the graph refuses to run under that.
    devices = {tensor.device.type for tensor in _tensors(model, args, kwargs)}
    for graph, (training, sample) in equal_on.items():
        with in_mode(model, training), in_mode(graph, training):
            keep_to_autocast(model, graph, sample, devices, tolerance)
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
            if not isinstance(compare(model, graph, sample, tolerance), Equal):
                return False
    return True


@contextmanager
def _nudged(model: nn.Module) -> Iterator[None]:
    """Change the values of parameters and buffers: numbers that the trace read from them are wrong then."""
    state = (*model.parameters(), *model.buffers())
    tensors = {id(tensor): tensor for one in state for tensor in innermost_tensors(one)}.values()
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
    if reason := without_values(model, args, kwargs):
        return reason
    state = [*model.parameters(), *model.buffers()]
    state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state)
    value_bytes = max(sum(_bytes(graph)) for graph in graphs.values())
    # two copies of the state with their gradients; values, and what autograd saves of them
    needed = 5 * state_bytes + 3 * value_bytes
    short = too_little(needed, (tensor.device for tensor in _tensors(model, args, kwargs)))
    if short is None:
        return ""
    device, free = short
    return f"it would take about {needed >> 20:,} MiB on {device}, and {free >> 20:,} MiB are free"


def without_values(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Why a model can't be run on an example, where a tensor has no values; empty where all have."""
    if all(map(has_memory, _tensors(model, args, kwargs))):
        return ""
    return "the model, or its example, is on the meta device or fake, and can't run"


def _tensors(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    yield from (leaf for leaf in flatten((args, dict(kwargs)))[0] if isinstance(leaf, Tensor))


def _bytes(graph: GraphModule) -> Iterator[int]:
    for node in graph.graph.nodes:
        value = metadata(node)
        if node.op.startswith("call_") and isinstance(value, torch.Tensor):
            elements = value.numel()
            if not is_symbolic(elements):  # else it depends on data
                yield elements * value.element_size()
