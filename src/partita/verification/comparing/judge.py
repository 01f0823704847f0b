"""Comparing two observations: all differences, the most telling first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from partita.verification.comparing.aliasing import compare_places, places
from partita.verification.comparing.compare import Mismatch, Tolerance, compare_values, count_leaves
from partita.verification.comparing.state_comparison import StateComparison
from partita.verification.observing import randomness
from partita.verification.observing.observe import Observation
from partita.verification.result import Difference, DifferenceKind
from partita.verification.tree import tensors

__all__ = ["Judge"]

_SORTS = ("outputs", "places in memory", "printed lines", "inputs", "gradients of inputs")
_DREW = "is in another state: the runs drew another amount of random numbers, or drew them differently"


@dataclass
class Judge:
    """Compares the observations of a candidate's and a reference's run.

    Attributes:
        state: the matched state of both sides.
        tolerance: how far numbers may be apart.
        strides: whether strides of outputs and inputs count.
        compared: how many things of each sort have been compared so far, without the state's.
    """

    state: StateComparison
    tolerance: Tolerance
    strides: bool = False
    compared: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_SORTS, 0)))

    def differences(self, candidate: Observation, reference: Observation) -> Iterator[Difference]:
        """Return all differences, the most telling first."""
        mine, theirs = candidate.tensors(), reference.tensors()
        yield from self._exceptions(candidate, reference)
        if candidate.returned and reference.returned:
            yield from self._nested(candidate.output, reference.output, "output", "output", "outputs")
        yield from self.state.copies(mine, theirs)
        yield from self._aliasing(candidate, reference, self.state.shared(mine, theirs))
        yield from self._printed(candidate, reference)
        for name in ("args", "kwargs"):
            left, right = getattr(candidate.copies, name), getattr(reference.copies, name)
            yield from self._nested(left, right, name, "input", "inputs")
        yield from self.state.after(mine, theirs)
        yield from self.state.values(candidate, reference)
        yield from self.state.gradients(mine, theirs, candidate, reference)
        yield from self._gradients_of_inputs(candidate, reference)
        yield from self._random(candidate, reference)
        yield from self._settings(candidate, reference)

    def _exceptions(self, candidate: Observation, reference: Observation) -> Iterator[Difference]:
        mine, theirs = candidate.raised, reference.raised
        if mine is None and theirs is None:
            return
        self.compared["exceptions"] += 1
        if mine is not None and theirs is not None:
            same_kind = (mine.stage, mine.type) == (theirs.stage, theirs.type)
            if same_kind and _same_text(mine.message, theirs.message):
                return
        message = f"candidate: {mine or 'none'}; reference: {theirs or 'none'}"
        yield Difference("exception", "exception", message)

    def _nested(
        self, mine: Any, theirs: Any, path: str, kind: DifferenceKind, sort: str
    ) -> Iterator[Difference]:
        self.compared[sort] += count_leaves(theirs)
        for mismatch in compare_values(mine, theirs, path, self.tolerance, strides=self.strides):
            yield _difference(kind, mismatch)

    def _aliasing(
        self,
        candidate: Observation,
        reference: Observation,
        state: list[tuple[str, torch.Tensor, torch.Tensor]],
    ) -> Iterator[Difference]:
        mine = _named(candidate, [(name, left) for name, left, _ in state])
        theirs = _named(reference, [(name, right) for name, _, right in state])
        if [name for name, _ in mine] != [name for name, _ in theirs]:
            return  # a difference of structure, and reported as one
        self.compared["places in memory"] += len(theirs)
        for mismatch in compare_places(places(mine), places(theirs)):
            yield _difference("aliasing", mismatch)

    def _printed(self, candidate: Observation, reference: Observation) -> Iterator[Difference]:
        # A graph module explains an exception on stderr, a plain module does not.
        quiet = candidate.raised is not None or reference.raised is not None
        mine, theirs = (_lines(side, stdout_only=quiet) for side in (candidate, reference))
        self.compared["printed lines"] += len(theirs)
        for number in range(max(len(mine), len(theirs))):
            left, right = (repr(side[number]) if number < len(side) else "missing" for side in (mine, theirs))
            if left != right:
                yield Difference("printed text", f"printed line {number + 1}", f"is {left}, not {right}")
                return

    def _gradients_of_inputs(self, candidate: Observation, reference: Observation) -> Iterator[Difference]:
        for (path, left), (_, right) in zip(candidate.copies.leaves, reference.copies.leaves, strict=True):
            self.compared["gradients of inputs"] += 1
            for mismatch in compare_values(left.grad, right.grad, f"gradient of {path}", self.tolerance):
                yield _difference("gradient", mismatch)

    def _random(self, candidate: Observation, reference: Observation) -> Iterator[Difference]:
        shared = [key for key in reference.random if key in candidate.random]
        self.compared["random states"] += len(shared)
        unequal = (
            key for key in shared if not randomness.same_state(candidate.random[key], reference.random[key])
        )
        for stage, name in _first_of_each(unequal):
            yield Difference("random state", f"{name} after {stage}", _DREW)

    def _settings(self, candidate: Observation, reference: Observation) -> Iterator[Difference]:
        shared = [key for key in reference.settings if key in candidate.settings]
        self.compared["global settings"] += len(shared)
        unequal = (key for key in shared if candidate.settings[key] != reference.settings[key])
        for key in _first_of_each(unequal):
            message = f"is {candidate.settings[key]!r}, not {reference.settings[key]!r}"
            yield Difference("global state", f"{key[1]} after {key[0]}", message)


def _named(
    observed: Observation, state: Iterable[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor]]:
    copies = observed.copies
    outside = [*tensors(copies.args, "args"), *tensors(copies.kwargs, "kwargs")]
    return [*outside, *state, *tensors(observed.output, "output")]


def _lines(observed: Observation, *, stdout_only: bool) -> list[str]:
    return [
        line if stream == "stdout" else f"{stream}: {line}"
        for stream, text in observed.printed
        if stream == "stdout" or not stdout_only
        for line in text.splitlines(keepends=True)
    ]


def _difference(kind: DifferenceKind, mismatch: Mismatch) -> Difference:
    return Difference(kind, mismatch.path, mismatch.message, mismatch.max_abs)


def _first_of_each(keys: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The keys with the first stage of each name: what differs after one stage differs after the next."""
    first: dict[str, str] = {}
    for stage, name in keys:
        first.setdefault(name, stage)
    return [(stage, name) for name, stage in first.items()]


def _same_text(mine: str, theirs: str) -> bool:
    """Whether one message contains the other, or the first lines agree: an interpreter adds the node."""
    left, right = " ".join(mine.split()), " ".join(theirs.split())
    if left and right and (left in right or right in left):
        return True
    return mine.strip().partition("\n")[0] == theirs.strip().partition("\n")[0]
