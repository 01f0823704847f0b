"""Finding the node, and its piece, that the first difference comes from.

Both sides run again, node by node, and a copy of each node's value is recorded when it is computed. The
candidate's pieces have nodes of the same names, so that values are compared by name::

    reference   a ── b ── c ── d
    candidate  [a ── b]  [c ── d]         the first of a, b, c, d that differs, in the reference's order

Gradients of these values are recorded by hooks, and compared from the last node to the first, as backward
computes them. Random draws are recorded as changes of the CPU generator's state. A compiled piece runs as it
is, and what it returns is compared: b and d here. Its backward pass computes the gradients of what it takes
and those of its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from partita._torch.autograd.region_switches import REGION_SWITCHES
from partita._torch.modules.contents import named_state
from partita.verification.comparing.compare import Mismatch, Tolerance, compare_values
from partita.verification.explaining.node_values import SILENT_OPS, NodeValues, Pieces, recording
from partita.verification.observing.observe import Mode, observe
from partita.verification.observing.subject import SplitLike, Subject, is_pipe, subject_of
from partita.verification.result import Difference

__all__ = ["explain", "explainable"]

_BY_GRADIENT = ("gradient",)
_BY_RANDOMNESS = ("random state",)
_BY_VALUE = ("output", "input", "parameter", "buffer", "attribute", "aliasing")
_NOT_THE_PIECES = "each piece computes what it does in the captured graph: that graph is not the reference"


@dataclass(frozen=True)
class _Finding:
    """What differs first: at which node, in which piece, and how it looks there."""

    node: str | None
    piece: str | None
    text: str


def explainable(candidate: Any, reference: Any) -> bool:
    """Return whether nodes can be matched by name: those of a split, or of nested graphs, with a graph's; or
    those of a pipe with those of the graph that was cut.
    """
    if is_pipe(candidate):
        return all(isinstance(piece.module, GraphModule) for piece in candidate.pieces)
    whole = candidate.module if isinstance(candidate, SplitLike) else candidate
    return isinstance(reference, GraphModule) and isinstance(whole, GraphModule)


def explain(
    differences: tuple[Difference, ...],
    candidate: Any,
    subjects: tuple[Subject, Subject],
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
    *,
    backward: bool,
    mode: Mode | None,
    seed: int,
    tolerance: Tolerance,
) -> tuple[Difference, ...]:
    """Return the same differences; the first one that some node explains names that node and its piece.

    This takes memory for a copy of every node's value, and with ``backward`` of its gradient, on both sides.
    """
    args, kwargs = call
    mine, theirs = NodeValues(), NodeValues()
    mine_of, theirs_of = subjects
    if not isinstance(theirs_of.call, GraphModule):
        theirs_of = subject_of(candidate.whole)
    assert isinstance(theirs_of.call, GraphModule)
    nodes = list(theirs_of.call.graph.nodes)
    pieces = Pieces.of(candidate, {node.name for node in nodes})
    for subject, notes, inside in ((mine_of, mine, pieces), (theirs_of, theirs, Pieces())):
        instrument = recording(notes, inside)
        observe(subject, args, kwargs, backward=backward, mode=mode, seed=seed, instrument=instrument)
    hidden = {name for piece in pieces.called.values() for name in piece.node_names}
    order = [node for node in nodes if node.op not in SILENT_OPS]
    if pieces.entered or pieces.called:  # which enter and leave regions by themselves
        hidden |= {node.name for node in order if node.target in REGION_SWITCHES}
    impure = {node.name for node in order if node.is_impure() and node.name not in hidden}
    ranked = [node.name for node in order]
    by_value = _first_value(ranked, impure, mine, theirs, tolerance)
    in_backward = by_value
    if by_value is None and pieces.called:
        in_backward = _first_backward(pieces, differences, mine, theirs, tolerance)
    elif by_value is None:
        in_backward = _first_gradient(ranked, mine, theirs, tolerance)
    by_draw = _first_draw([name for name in ranked if name not in hidden], mine, theirs)
    searches = ((_BY_VALUE, by_value), (_BY_GRADIENT, in_backward), (_BY_RANDOMNESS, by_draw))
    for number, difference in enumerate(differences):
        finding = next((finding for kinds, finding in searches if difference.kind in kinds), None)
        if finding is not None:
            explained = _with(difference, finding)
            return (*differences[:number], explained, *differences[number + 1 :])
    if is_pipe(candidate) and theirs_of is not subjects[1]:
        first = replace(differences[0], message=f"{differences[0].message}\n   {_NOT_THE_PIECES}")
        return (first, *differences[1:])
    return differences


def _with(difference: Difference, finding: _Finding) -> Difference:
    places = (("node", finding.node), ("piece", finding.piece))
    place = " in ".join(f"{what} {name}" for what, name in places if name)
    message = f"{difference.message}\n   first seen at {place}: {finding.text}"
    return replace(difference, message=message, piece=finding.piece, node=finding.node)


def _first_value(
    ranked: list[str], impure: set[str], mine: NodeValues, theirs: NodeValues, tolerance: Tolerance
) -> _Finding | None:
    for name in ranked:
        piece = mine.piece_of.get(name)
        if name not in mine.piece_of:
            if name in impure and name in theirs.piece_of:
                return _Finding(name, None, "has an effect, and never runs in the candidate")
            continue
        mismatch = _mismatch(mine.values, theirs.values, name, tolerance)
        if mismatch is not None:
            return _Finding(name, piece, mismatch.message)
    return None


def _first_gradient(
    ranked: list[str], mine: NodeValues, theirs: NodeValues, tolerance: Tolerance
) -> _Finding | None:
    for name in reversed(ranked):
        if name not in mine.piece_of:
            continue
        mismatch = _mismatch(mine.gradients, theirs.gradients, name, tolerance)
        if mismatch is not None:
            return _Finding(name, mine.piece_of[name], f"its gradient: {mismatch.message}")
    return None


def _first_backward(
    pieces: Pieces,
    differences: Sequence[Difference],
    mine: NodeValues,
    theirs: NodeValues,
    tolerance: Tolerance,
) -> _Finding | None:
    """The last piece whose backward pass computes a gradient that differs. That of a value which several
    pieces take is complete when the first of them has run.
    """
    first_users: dict[str, str] = {}
    for piece in pieces.ordered:
        for name in piece.inputs:
            first_users.setdefault(name, piece.name)
    other_gradients = {one.where for one in differences if one.kind == "gradient"}
    for piece in reversed(pieces.ordered):
        for name in piece.inputs:
            mismatch = _mismatch(mine.gradients, theirs.gradients, name, tolerance)
            if mismatch is not None and first_users[name] == piece.name:
                return _Finding(None, piece.name, f"it computes the gradient of {name}: {mismatch.message}")
        for name, _ in named_state(piece.module):
            if f"gradient of {name}" in other_gradients:
                return _Finding(None, piece.name, f"it computes the gradient of {name}")
    return None


def _first_draw(ranked: list[str], mine: NodeValues, theirs: NodeValues) -> _Finding | None:
    for name in ranked:
        left, right = mine.draws.get(name, {}), theirs.draws.get(name, {})
        if name in mine.piece_of and bool(left) != bool(right):
            text = "draws random numbers" if left else "draws no random numbers"
            return _Finding(name, mine.piece_of[name], f"{text}, unlike in the reference")
        for generator in sorted(left.keys() | right.keys()) if left and right else ():
            alike = generator in left and generator in right and left[generator].equal(right[generator])
            if not alike:
                return _Finding(name, mine.piece_of[name], f"leaves the {generator} in another state")
    return None


def _mismatch(
    mine: Mapping[str, dict[str, Any]],
    theirs: Mapping[str, dict[str, Any]],
    name: str,
    tolerance: Tolerance,
) -> Mismatch | None:
    return next(compare_values(mine.get(name, {}), theirs.get(name, {}), "", tolerance), None)
