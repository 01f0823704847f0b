"""Comparing a captured graph with its model on one sample.

Where they differ, it may be by a call before (`Keeps`), since one of them does not take such a sample
(`NotTaken`), or since the model does not equal itself (`NotComparable`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule

from partita.capture.merging.modes import in_mode
from partita.capture.proving.differing_node import differing_node
from partita.capture.proving.forward_difference import NOT_KEPT
from partita.capture.proving.kept_state import attributes_set, called_before
from partita.capture.proving.samples import Sample
from partita.listing import listed
from partita.verification import Verification, verify
from partita.verification.comparing.compare import Tolerance

__all__ = [
    "Different",
    "Equal",
    "Keeps",
    "NotComparable",
    "NotTaken",
    "Outcome",
    "compare",
    "compare_in_a_row",
]

_SHOWN = 3


@dataclass(frozen=True)
class Equal:
    """Model and graph are equal on a sample, but for these attributes, which the graph lacks."""

    sample: Sample
    unkept: tuple[str, ...]


@dataclass(frozen=True)
class Keeps:
    """The model keeps something that the graph does not, for its next call, of this mode or of the other."""

    text: str
    across_modes: bool = False


@dataclass(frozen=True)
class NotTaken:
    """The model, or the graph by an error of its own, refuses the sample."""

    why: str


@dataclass(frozen=True)
class Different:
    """How model and graph differ on a sample: a line each, the first with the sample."""

    text: str


@dataclass(frozen=True)
class NotComparable:
    """Why the model can be compared with nothing, on any sample."""

    why: str


Outcome = Equal | Keeps | NotTaken | Different | NotComparable


def compare_in_a_row(
    model: nn.Module, graph: GraphModule, other: GraphModule | None, sample: Sample, tolerance: Tolerance
) -> Outcome:
    """Whether both are equal after the calls that come before the sample: one in the other mode, if there is
    a graph for that, and one in this mode. Where those fail, the sample alone tells.
    """
    outcome = compare(model, graph, sample, tolerance, other)
    if isinstance(outcome, (Equal, NotComparable)) or sample.before is None:
        return outcome
    if other is not None:
        in_this_mode = compare(model, graph, sample, tolerance)
        if isinstance(outcome, Different) and isinstance(in_this_mode, Equal):
            with in_mode(model, not model.training):
                names = _attributes_set(model, sample)
            return Keeps(
                _kept_text(names, "a call after one in the other mode", outcome.text), across_modes=True
            )
        outcome = in_this_mode
    alone = compare(model, graph, sample.alone, tolerance)
    if isinstance(outcome, Different) and isinstance(alone, Equal):
        return Keeps(_kept_text(_attributes_set(model, sample), "the second of two calls", outcome.text))
    return alone


def compare(
    model: nn.Module,
    graph: GraphModule,
    sample: Sample,
    tolerance: Tolerance,
    other: GraphModule | None = None,
) -> Outcome:
    """Compare both on a sample, or on its gentler one where they do not take it."""
    # Compare.
    try:
        verification = _verify(graph, model, sample, tolerance, other)
    except TypeError as error:  # it runs copies
        return NotComparable(f"the model can't be copied ({error})")
    if verification.raised is not None:
        if sample.gentle:
            return compare(model, graph, sample.gentle, tolerance, other)
        return NotTaken(f"it raises {verification.raised}")
    differences = [one for one in verification.differences if one.kind not in NOT_KEPT]
    if not differences:
        attributes = [one.where for one in verification.differences if one.kind == "attribute"]
        return Equal(sample, tuple(name.removeprefix("attribute ") for name in attributes))
    # One of the two may refuse the sample, or the model may not even equal itself.
    raised = next((one.message for one in differences if one.kind == "exception"), "")
    if _refused(raised):
        return NotTaken(f"only one of graph and model raises: {raised}")
    if "candidate: none" in raised:  # the model does not take this sample, the graph does
        if sample.gentle:
            return compare(model, graph, sample.gentle, tolerance, other)
        return NotTaken(f"only one of graph and model raises: {raised}")
    again = _verify(model, model, sample, tolerance, None if other is None else model)
    if not again.ok and {one.where for one in differences} <= {one.where for one in again.differences}:
        return NotComparable(f"two runs of the model itself differ in {again.differences[0].where}")
    # Describe the differences.
    lines = [f"{sample.kind}: {one}" for one in differences[:_SHOWN]]
    if len(differences) > _SHOWN:
        lines.append(f"and {len(differences) - _SHOWN} more differences")
    nodes = [] if sample.before else differing_node(graph, model, sample, differences[0])
    return Different("\n    ".join([*lines, *nodes]))


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
