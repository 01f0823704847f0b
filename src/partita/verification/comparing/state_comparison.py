"""Comparing parameters, buffers, other attributes and gradients of candidate and reference, name by name.

Terms:
    holder: a name under which the candidate holds a tensor of the reference. There may be several (one in
        each piece that uses it), or none.
    replaced: an attribute to which the run assigned another tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from partita.verification.comparing.compare import Mismatch, Tolerance, compare_values
from partita.verification.comparing.matching import match_names
from partita.verification.observing.observe import Observation
from partita.verification.observing.snapshot import NamedTensor, named_tensors
from partita.verification.observing.subject import Subject
from partita.verification.result import Difference, DifferenceKind

__all__ = ["StateComparison"]

_SORTS = ("initial tensors", "parameters", "buffers", "attributes", "gradients of parameters")
_NO_HOLDER = "the candidate holds no such tensor, but the reference {what} it"
_NO_ORIGINAL = "the reference holds no such tensor, but the candidate {what} it"
_UNNAMED = "a tensor that the model has no name for (an element of a list, a module in a list)"
_Gradient: TypeAlias = tuple[str, torch.Tensor, torch.Tensor | None]
"""Where a gradient is, the tensor that it is of, and the gradient."""


@dataclass(frozen=True)
class _Pair:
    """One tensor of the reference (tied names count once) and its holders."""

    name: str
    kind: DifferenceKind
    before: torch.Tensor
    holders: tuple[str, ...]


class StateComparison:
    """The state of both sides, matched by name before anything runs.

    Attributes:
        compared: how many things of each sort have been compared so far.
    """

    def __init__(self, candidate: Subject, reference: Subject, tolerance: Tolerance) -> None:
        self.compared: Counter[str] = Counter(dict.fromkeys(_SORTS, 0))
        self._tolerance = tolerance
        self._candidate = named_tensors(candidate)
        self._reference = named_tensors(reference)
        self._matched = _match(self._candidate, self._reference)
        self._pairs = tuple(_pair_up(self._reference, self._matched))

    def initial(self) -> Iterator[Difference]:
        """Return the differences before the runs: the runs are comparable only if there are none."""
        for pair in self._pairs:
            for name in pair.holders:
                mine = self._candidate[name].tensor
                self.compared["initial tensors"] += 1
                if mine is pair.before:
                    continue
                yield from self._differ("initial state", mine, pair.before, f"{pair.kind} {pair.name}")
                yield from self._differ(
                    "initial state", _gradient(mine), _gradient(pair.before), f"gradient of {pair.name}"
                )

    def shared(
        self, candidate: Mapping[str, NamedTensor], reference: Mapping[str, NamedTensor]
    ) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Return name, candidate's tensor and reference's tensor, for all that both hold after the runs."""
        return [
            (pair.name, candidate[name].tensor, reference[pair.name].tensor)
            for pair in self._pairs
            if pair.name in reference
            for name in pair.holders[:1]
            if name in candidate
        ]

    def copies(
        self, candidate: Mapping[str, NamedTensor], reference: Mapping[str, NamedTensor]
    ) -> Iterator[Difference]:
        """Return the tensors of the reference that are several tensors in the candidate.

        An attribute that the run replaces may be, and what the run unties in the reference.
        """
        for pair in self._pairs:
            originals = (self._matched[name] for name in pair.holders)
            theirs = [reference[name].tensor for name in originals if name in reference]
            if _is_replaced(pair, reference) or any(tensor is not theirs[0] for tensor in theirs):
                continue
            tensors = [candidate[name].tensor for name in pair.holders if name in candidate]
            if any(tensor is not tensors[0] for tensor in tensors):
                names = ", ".join(pair.holders)
                yield Difference(
                    "aliasing", pair.name, f"is several separate tensors, which drift apart: {names}"
                )

    def after(
        self, candidate: Mapping[str, NamedTensor], reference: Mapping[str, NamedTensor]
    ) -> Iterator[Difference]:
        """Return the differences of parameters, buffers and attributes after the runs."""
        for pair in self._pairs:
            now, where = _now(reference, pair.name, pair.before), f"{pair.kind} {pair.name}"
            if not pair.holders and self._differs(now, pair.before):
                yield Difference(pair.kind, where, _NO_HOLDER.format(what="changes"))
            # a run may untie names by assigning to one of them
            tensors = [
                (self._after(candidate, name), _now(reference, self._matched[name], pair.before))
                for name in pair.holders
            ]
            if _is_replaced(pair, reference):
                # one of several holders replaces it; others keep what they had, or have no data
                replacing = [candidate[name] for name in pair.holders if name in candidate]
                replacing = [item for item in replacing if item.replaced and not item.tensor.is_meta]
                tensors = [(item.tensor, now) for item in replacing] or tensors
            self.compared[f"{pair.kind}s"] += len(tensors)
            for mine, theirs in tensors:
                yield from self._differ(pair.kind, mine, theirs, where)
        for name in _without(self._candidate, self._matched):
            before = self._candidate[name]
            if self._differs(self._after(candidate, name), before.tensor):
                yield Difference(before.kind, f"{before.kind} {name}", _NO_ORIGINAL.format(what="changes"))
        yield from self._added(candidate, reference)

    def gradients(
        self,
        candidate: Mapping[str, NamedTensor],
        reference: Mapping[str, NamedTensor],
        mine: Observation,
        theirs: Observation,
    ) -> Iterator[Difference]:
        """Return the differences of gradients. No gradient is not the same as a gradient of zeros.

        What a side has no name for is paired with what has the same elements and gradient on the other.
        """
        for pair in self._pairs:
            now, where = _now(reference, pair.name, pair.before), f"gradient of {pair.name}"
            if not pair.holders and self._differs(_gradient(now), _gradient(pair.before)):
                yield Difference("gradient", where, _NO_HOLDER.format(what="gives a gradient to"))
            tensors = (self._after(candidate, name) for name in pair.holders)
            for tensor in {id(tensor): tensor for tensor in tensors}.values():
                if tensor.requires_grad or now.requires_grad:
                    self.compared["gradients of parameters"] += 1
                    yield from self._differ("gradient", _gradient(tensor), _gradient(now), where)
        unpaired = list(theirs.unnamed)
        for where, *left in (*self._gradients_of_others(candidate), *_gradients_of_unnamed(mine)):
            twin = next((n for n, right in enumerate(unpaired) if not self._differs(left, [*right])), None)
            if twin is None:
                yield Difference("gradient", where, _NO_ORIGINAL.format(what="gives a gradient to"))
            else:
                self.compared["gradients of parameters"] += 1
                del unpaired[twin]
        theirs = replace(theirs, unnamed=tuple(unpaired))
        for where, *_ in _gradients_of_unnamed(theirs):
            yield Difference("gradient", where, _NO_HOLDER.format(what="gives a gradient to"))

    def _gradients_of_others(self, candidate: Mapping[str, NamedTensor]) -> Iterator[_Gradient]:
        """Those which the run gave to tensors of the candidate that are matched with none."""
        seen = set[int]()
        for name in _without(self._candidate, self._matched):
            now, before = self._after(candidate, name), self._candidate[name].tensor
            if id(now) not in seen and self._differs(_gradient(now), _gradient(before)):
                seen.add(id(now))
                yield f"gradient of {name}", now, _gradient(now)

    def values(self, mine: Observation, theirs: Observation) -> Iterator[Difference]:
        """Return the differences of the attributes that a run changed; the others a graph may lack."""
        candidate, reference = mine.values(), theirs.values()
        # Numbers have no identity: one list a name keeps equal ones apart.
        matched = match_names({name: [name] for name in candidate}, {name: [name] for name in reference})
        holders = {theirs: mine for mine, theirs in matched.items()}
        for name, value in reference.items():
            self.compared["plain attributes"] += 1
            where, changed = f"attribute {name}", _changed(name, reference, theirs.values_before)
            if name not in holders:
                if changed:
                    message = _NO_HOLDER.replace("tensor", "attribute").format(what="changes")
                    yield Difference("attribute", where, message)
                continue
            holder = holders[name]
            if (changed or _changed(holder, candidate, mine.values_before)) and candidate[holder] != value:
                yield Difference("attribute", where, f"is {candidate[holder]!r}, not {value!r}")

    def _added(
        self, candidate: Mapping[str, NamedTensor], reference: Mapping[str, NamedTensor]
    ) -> Iterator[Difference]:
        """Differences of the tensors that were added by the runs."""
        mine = {name: item for name, item in candidate.items() if name not in self._candidate}
        theirs = {name: item for name, item in reference.items() if name not in self._reference}
        matched = _match(mine, theirs)
        with_values = {other for name, other in matched.items() if not mine[name].tensor.is_meta}
        for name, other in matched.items():
            if mine[name].tensor.is_meta and other in with_values:
                continue  # a later stage has what it was told of it
            where = f"{theirs[other].kind} {other}"
            yield from self._differ(theirs[other].kind, mine[name].tensor, theirs[other].tensor, where)
        for name in _without(mine, matched):
            yield Difference(mine[name].kind, f"{mine[name].kind} {name}", _NO_ORIGINAL.format(what="adds"))
        for name in _without(theirs, set(matched.values())):
            yield Difference(theirs[name].kind, f"{theirs[name].kind} {name}", _NO_HOLDER.format(what="adds"))

    def _after(self, candidate: Mapping[str, NamedTensor], name: str) -> torch.Tensor:
        return _now(candidate, name, self._candidate[name].tensor)

    def _differ(self, kind: DifferenceKind, mine: object, theirs: object, where: str) -> Iterator[Difference]:
        for mismatch in self._mismatches(mine, theirs, where):
            yield Difference(kind, mismatch.path, mismatch.message, mismatch.max_abs)

    def _differs(self, mine: object, theirs: object) -> bool:
        return next(self._mismatches(mine, theirs, ""), None) is not None

    def _mismatches(self, mine: object, theirs: object, where: str) -> Iterator[Mismatch]:
        return compare_values(mine, theirs, where, self._tolerance)


def _match(candidate: Mapping[str, NamedTensor], reference: Mapping[str, NamedTensor]) -> dict[str, str]:
    return match_names(
        {name: item.tensor for name, item in candidate.items()},
        {name: item.tensor for name, item in reference.items()},
    )


def _pair_up(reference: Mapping[str, NamedTensor], matched: Mapping[str, str]) -> Iterator[_Pair]:
    holders: dict[int, list[str]] = {}
    for mine, theirs in matched.items():
        holders.setdefault(id(reference[theirs].tensor), []).append(mine)
    seen = set()
    for name, item in reference.items():
        if id(item.tensor) not in seen:
            seen.add(id(item.tensor))
            yield _Pair(name, item.kind, item.tensor, tuple(holders.get(id(item.tensor), ())))


def _is_replaced(pair: _Pair, reference: Mapping[str, NamedTensor]) -> bool:
    return pair.kind == "attribute" and pair.name in reference and reference[pair.name].replaced


def _now(after: Mapping[str, NamedTensor], name: str, before: torch.Tensor) -> torch.Tensor:
    # A copied graph module lacks what its graph does not use: that is unchanged.
    return after[name].tensor if name in after else before


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _gradients_of_unnamed(side: Observation) -> Iterator[_Gradient]:
    """Those of tensors that were there before the run; the run may make others."""
    for leaf, gradient in side.unnamed:
        if id(leaf) in side.copies.tensors:
            yield f"gradient of {_UNNAMED}", leaf, gradient


def _changed(name: str, after: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return name not in before or before[name] != after[name]


def _without(names: Iterable[str], others: Container[str]) -> list[str]:
    return [name for name in names if name not in others]  # in order, which a difference of sets is not
