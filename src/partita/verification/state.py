"""Parameters, buffers, plain attributes and gradients: candidate's against reference's, name by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from partita.verification.compare import Mismatch, Tolerance, compare_values
from partita.verification.matching import match_names
from partita.verification.result import Difference, DifferenceKind
from partita.verification.snapshot import NamedTensor, named_tensors, named_values
from partita.verification.subject import Subject

__all__ = ["StateComparison"]

_SORTS = ("initial tensors", "parameters", "buffers", "attributes", "gradients of parameters")
_NO_HOLDER = "the candidate holds no such tensor, but the reference {what} it"
_NO_ORIGINAL = "the reference holds no such tensor, but the candidate {what} it"


@dataclass(frozen=True)
class _Pair:
    """One tensor of the reference (tied names are one), and the candidate's names for it: none or more."""

    name: str
    kind: DifferenceKind
    before: torch.Tensor
    holders: tuple[str, ...]


class StateComparison:
    """What both sides hold, matched once, before anything runs.

    Attributes:
        compared: how many things of each sort have been compared so far.
    """

    def __init__(self, candidate: Subject, reference: Subject, tolerance: Tolerance) -> None:
        self.compared: Counter[str] = Counter(dict.fromkeys(_SORTS, 0))
        self._tolerance = tolerance
        self._candidate = named_tensors(candidate)
        self._reference = named_tensors(reference)
        self._values = named_values(candidate), named_values(reference)
        self._matched = _match(self._candidate, self._reference)
        self._pairs = tuple(_pair_up(self._reference, self._matched))

    def initial(self) -> Iterator[Difference]:
        """Whether both start from the same state: otherwise the runs prove nothing."""
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
        """Name, candidate's tensor and reference's tensor, for all that both hold after the runs."""
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
        """One tensor of the reference that is several in the candidate; an attribute that each call makes
        anew may be.
        """
        for pair in self._pairs:
            if pair.kind == "attribute" and pair.name in reference and reference[pair.name].made:
                continue
            found = [candidate[name].tensor for name in pair.holders if name in candidate]
            if any(tensor is not found[0] for tensor in found):
                names = ", ".join(pair.holders)
                yield Difference(
                    "aliasing", pair.name, f"is several separate tensors, which drift apart: {names}"
                )

    def after(
        self, candidate: Mapping[str, NamedTensor], reference: Mapping[str, NamedTensor]
    ) -> Iterator[Difference]:
        """Parameters, buffers and attributes after the runs."""
        for pair in self._pairs:
            now, where = _now(reference, pair.name, pair.before), f"{pair.kind} {pair.name}"
            if not pair.holders and self._differs(now, pair.before):
                yield Difference(pair.kind, where, _NO_HOLDER.format(what="changes"))
            found = [self._held(candidate, name) for name in pair.holders]
            if pair.kind == "attribute" and pair.name in reference and reference[pair.name].made:
                # one of several holders makes it anew; others keep what they had, or have no data
                makers = [name for name in pair.holders if name in candidate and candidate[name].made]
                found = [
                    candidate[name].tensor for name in makers if not candidate[name].tensor.is_meta
                ] or found
            self.compared[_plural(pair.kind)] += len(found)
            for tensor in found:
                yield from self._differ(pair.kind, tensor, now, where)
        for name in _without(self._candidate, self._matched):
            held = self._candidate[name]
            if self._differs(self._held(candidate, name), held.tensor):
                yield Difference(held.kind, f"{held.kind} {name}", _NO_ORIGINAL.format(what="changes"))
        yield from self._added(candidate, reference)

    def gradients(
        self, candidate: Mapping[str, NamedTensor], reference: Mapping[str, NamedTensor]
    ) -> Iterator[Difference]:
        """Gradients of what the subjects hold. No gradient is not the same as a gradient of zeros."""
        for pair in self._pairs:
            now, where = _now(reference, pair.name, pair.before), f"gradient of {pair.name}"
            if not pair.holders and self._differs(_gradient(now), _gradient(pair.before)):
                yield Difference("gradient", where, _NO_HOLDER.format(what="gives a gradient to"))
            held = {id(tensor): tensor for tensor in (self._held(candidate, name) for name in pair.holders)}
            for tensor in held.values():
                if tensor.requires_grad or now.requires_grad:
                    self.compared["gradients of parameters"] += 1
                    yield from self._differ("gradient", _gradient(tensor), _gradient(now), where)
        for name in _without(self._candidate, self._matched):
            before = self._candidate[name].tensor
            if self._differs(_gradient(self._held(candidate, name)), _gradient(before)):
                yield Difference(
                    "gradient", f"gradient of {name}", _NO_ORIGINAL.format(what="gives a gradient to")
                )

    def values(self, candidate: Mapping[str, Any], reference: Mapping[str, Any]) -> Iterator[Difference]:
        """Plain attributes, where a run changed one: what a graph does not need, its module may lack."""
        mine_before, theirs_before = self._values
        # Numbers have no identity: one list a name keeps equal ones apart.
        matched = match_names({name: [name] for name in candidate}, {name: [name] for name in reference})
        holders = {theirs: mine for mine, theirs in matched.items()}
        for name, value in reference.items():
            self.compared["plain attributes"] += 1
            where, changed = f"attribute {name}", _changed(name, reference, theirs_before)
            if name not in holders:
                if changed:
                    yield Difference(
                        "attribute", where, _NO_HOLDER.replace("tensor", "attribute").format(what="changes")
                    )
                continue
            mine = holders[name]
            if (changed or _changed(mine, candidate, mine_before)) and candidate[mine] != value:
                yield Difference("attribute", where, f"is {candidate[mine]!r}, not {value!r}")

    def _added(
        self, candidate: Mapping[str, NamedTensor], reference: Mapping[str, NamedTensor]
    ) -> Iterator[Difference]:
        """Tensors that a run gave a module for the first time."""
        mine = {name: held for name, held in candidate.items() if name not in self._candidate}
        theirs = {name: held for name, held in reference.items() if name not in self._reference}
        matched = _match(mine, theirs)
        for name, other in matched.items():
            where = f"{theirs[other].kind} {other}"
            yield from self._differ(theirs[other].kind, mine[name].tensor, theirs[other].tensor, where)
        for name in _without(mine, matched):
            yield Difference(mine[name].kind, f"{mine[name].kind} {name}", _NO_ORIGINAL.format(what="adds"))
        for name in _without(theirs, set(matched.values())):
            yield Difference(theirs[name].kind, f"{theirs[name].kind} {name}", _NO_HOLDER.format(what="adds"))

    def _held(self, candidate: Mapping[str, NamedTensor], name: str) -> torch.Tensor:
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
        {name: held.tensor for name, held in candidate.items()},
        {name: held.tensor for name, held in reference.items()},
    )


def _pair_up(reference: Mapping[str, NamedTensor], matched: Mapping[str, str]) -> Iterator[_Pair]:
    holders: dict[int, list[str]] = {}
    for mine, theirs in matched.items():
        holders.setdefault(id(reference[theirs].tensor), []).append(mine)
    done = set()
    for name, held in reference.items():
        if id(held.tensor) not in done:
            done.add(id(held.tensor))
            yield _Pair(name, held.kind, held.tensor, tuple(holders.get(id(held.tensor), ())))


def _now(after: Mapping[str, NamedTensor], name: str, before: torch.Tensor) -> torch.Tensor:
    # A copied graph module leaves out what its graph does not use: that is as it was.
    return after[name].tensor if name in after else before


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _changed(name: str, after: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return name not in before or before[name] != after[name]


def _without(names: Iterable[str], known: Container[str]) -> list[str]:
    return [name for name in names if name not in known]  # in order, which a difference of sets is not


def _plural(kind: str) -> str:
    return f"{kind}s"
