"""Finding the node, and its piece, that the first difference comes from.

Both sides run again, node by node, and a copy of each node's value is recorded when it is computed. The
candidate's pieces have nodes of the same names, so that values are compared by name::

    reference   a ── b ── c ── d
    candidate  [a ── b]  [c ── d]         the first of a, b, c, d that differs, in the reference's order

Gradients of these values are recorded by hooks, and compared from the last node to the first, as backward
computes them. Random draws are recorded as changes of the CPU generator's state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from partita.errors import ArgumentTypeError
from partita.verification.comparing.compare import Mismatch, Tolerance, compare_values
from partita.verification.observing.observe import Mode, observe
from partita.verification.observing.subject import SplitLike, Subject
from partita.verification.result import Difference
from partita.verification.tree import tensors

__all__ = ["explain", "explainable"]

_Value = dict[str, torch.Tensor]
_SILENT_OPS = ("placeholder", "get_attr", "output")
_BY_GRADIENT = ("gradient",)
_BY_RANDOMNESS = ("random state",)
_BY_VALUE = ("output", "input", "parameter", "buffer", "attribute", "aliasing")


@dataclass
class _Notes:
    """Recordings of one run, by the name of the node.

    Attributes:
        values: the tensors of a node's value, detached copies that keep ``requires_grad``.
        gradients: the gradients of these tensors.
        draws: the state of the CPU generator after each node that changed it.
        piece_of: the piece in which each node ran.
    """

    values: dict[str, _Value] = field(default_factory=dict)
    gradients: dict[str, _Value] = field(default_factory=dict)
    draws: dict[str, torch.Tensor] = field(default_factory=dict)
    piece_of: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Finding:
    node: str
    piece: str | None
    text: str


def explainable(candidate: Any, reference: Any) -> bool:
    """Return whether nodes can be matched by name: those of a split, or of nested graphs, with a graph's."""
    whole = candidate.module if isinstance(candidate, SplitLike) else candidate
    return isinstance(reference, torch.fx.GraphModule) and isinstance(whole, torch.fx.GraphModule)


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
    mine, theirs = _Notes(), _Notes()
    nodes = list(subjects[1].call.graph.nodes)  # type: ignore[attr-defined]
    pieces = _pieces(candidate, {node.name for node in nodes})
    for subject, notes, inside in zip(subjects, (mine, theirs), (pieces, {}), strict=True):
        instrument = _recording(notes, inside)
        observe(subject, args, kwargs, backward=backward, mode=mode, seed=seed, instrument=instrument)
    order = [node for node in nodes if node.op not in _SILENT_OPS]
    impure = {node.name for node in order if node.is_impure()}
    ranked = [node.name for node in order]
    by_value = _first_value(ranked, impure, mine, theirs, tolerance)
    searches: tuple[tuple[tuple[str, ...], _Finding | None], ...] = (
        (_BY_VALUE, by_value),
        (_BY_GRADIENT, by_value or _first_gradient(ranked, mine, theirs, tolerance)),
        (_BY_RANDOMNESS, _first_draw(ranked, mine, theirs)),
    )
    for number, difference in enumerate(differences):
        finding = next((finding for kinds, finding in searches if difference.kind in kinds), None)
        if finding is not None:
            explained = _with(difference, finding)
            return (*differences[:number], explained, *differences[number + 1 :])
    return differences


def _with(difference: Difference, finding: _Finding) -> Difference:
    place = f"node {finding.node}" + (f" in piece {finding.piece}" if finding.piece else "")
    message = f"{difference.message}\n   first seen at {place}: {finding.text}"
    return replace(difference, message=message, piece=finding.piece, node=finding.node)


def _first_value(
    ranked: list[str], impure: set[str], mine: _Notes, theirs: _Notes, tolerance: Tolerance
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


def _first_gradient(ranked: list[str], mine: _Notes, theirs: _Notes, tolerance: Tolerance) -> _Finding | None:
    for name in reversed(ranked):
        if name not in mine.piece_of:
            continue
        mismatch = _mismatch(mine.gradients, theirs.gradients, name, tolerance)
        if mismatch is not None:
            return _Finding(name, mine.piece_of[name], f"its gradient: {mismatch.message}")
    return None


def _first_draw(ranked: list[str], mine: _Notes, theirs: _Notes) -> _Finding | None:
    for name in ranked:
        left, right = mine.draws.get(name), theirs.draws.get(name)
        if name in mine.piece_of and (left is None) != (right is None):
            text = "draws random numbers" if left is not None else "draws no random numbers"
            return _Finding(name, mine.piece_of[name], f"{text}, unlike in the reference")
        if left is not None and right is not None and not torch.equal(left, right):
            return _Finding(name, mine.piece_of[name], "leaves the CPU generator in another state")
    return None


def _mismatch(
    mine: Mapping[str, _Value], theirs: Mapping[str, _Value], name: str, tolerance: Tolerance
) -> Mismatch | None:
    return next(compare_values(mine.get(name, {}), theirs.get(name, {}), "", tolerance), None)


def _pieces(candidate: Any, whole: set[str]) -> dict[str, frozenset[str] | None]:
    """The submodules of the candidate that are pieces, with the reference's nodes in each (None: all)."""
    if isinstance(candidate, SplitLike):
        return {piece.name: frozenset(piece.node_names) for piece in candidate.pieces}
    calls = [n for n in candidate.graph.nodes if n.op == "call_module" and n.name not in whole]
    named = {str(call.target): candidate.get_submodule(str(call.target)) for call in calls}
    return {name: None for name, module in named.items() if isinstance(module, torch.fx.GraphModule)}


def _recording(
    notes: _Notes, pieces: Mapping[str, frozenset[str] | None]
) -> Callable[[Subject], Callable[..., Any]]:
    """An ``instrument`` for `observe` that runs a copied graph module node by node."""

    def instrument(subject: Subject) -> Callable[..., Any]:
        if not isinstance(subject.call, torch.fx.GraphModule):
            raise ArgumentTypeError(f"a {type(subject.call).__name__} has no nodes to run one by one")
        return _Recorder(subject.call, notes, pieces).run_bound

    return instrument


class _Recorder(torch.fx.Interpreter):
    """Runs a graph, and the pieces that it calls, and records the value of each node."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        notes: _Notes,
        pieces: Mapping[str, frozenset[str] | None],
        piece: str | None = None,
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._notes = notes
        self._pieces = pieces
        self._piece = piece
        self._forward = module.forward

    def run_bound(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the arguments of a call of the module."""
        bound = inspect.signature(self._forward).bind(*args, **kwargs)
        bound.apply_defaults()
        flat: list[Any] = []
        for name, value in bound.arguments.items():
            many = bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            flat.extend(value) if many else flat.append(value)
        return self.run(*flat)

    def run_node(self, n: torch.fx.Node) -> Any:
        before = torch.get_rng_state()
        result = super().run_node(n)
        if n.op in _SILENT_OPS or not self._is_of_the_whole(n):
            return result
        self._notes.piece_of[n.name] = self._piece
        after = torch.get_rng_state()
        if not torch.equal(before, after):
            self._notes.draws[n.name] = after
        self._note(n.name, result)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._piece is not None or target not in self._pieces:
            return super().call_module(target, args, kwargs)
        inner = self.fetch_attr(target)
        return _Recorder(inner, self._notes, self._pieces, target).run_bound(*args, **kwargs)

    def _is_of_the_whole(self, node: torch.fx.Node) -> bool:
        """Whether a node comes from the whole graph: the stitched graph has others, also of the same name."""
        if self._piece is None:
            stitched = bool(self._pieces)
            return not stitched or (node.op != "call_module" and node.name not in self._notes.piece_of)
        wanted = self._pieces[self._piece]
        return wanted is None or node.name in wanted

    def _note(self, name: str, result: Any) -> None:
        values = self._notes.values.setdefault(name, {})
        for path, tensor in tensors(result, ""):
            copied = tensor.detach().clone()
            values[path] = copied.requires_grad_() if tensor.requires_grad else copied
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._catch(name, path))

    def _catch(self, name: str, path: str) -> Callable[[torch.Tensor], None]:
        gradients = self._notes.gradients.setdefault(name, {})

        def catch(gradient: torch.Tensor) -> None:
            gradients[path] = gradient.detach().clone()

        return catch
