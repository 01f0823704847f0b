"""Who needs which value from whom: all that the ranks of a pipeline must agree on, as data.

A value goes straight from its producer to every stage that uses it. Its gradient comes back along the chain
of its users, last first, each adding its own share, so that contributions are summed in the order in which
autograd sums them in the uncut model::

    forward    0 ---> 1        backward    0 <--- 1
               0 -------> 3                       1 <------ 3

A parameter that several stages hold travels the same way backwards (its value does not travel: each stage has
it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from partita.errors import SignatureMismatch

__all__ = [
    "MASK",
    "Constant",
    "Named",
    "Routes",
    "StageBorder",
    "Tied",
    "Value",
    "accept",
    "describe",
    "make_routes",
]

MASK = ""
"""Among the tags: the name of a message of gradients' mask."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses a border: what the receiving side must make room for.

    ``requires_grad``: whether a gradient comes back for it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Value:
        """What ``tensor`` looks like, under that name."""
        return cls(name, tuple(tensor.shape), tensor.dtype, bool(tensor.requires_grad))

    def describe(self) -> str:
        """For messages."""
        return f"{self.name}: {_text(self.dtype, self.shape, self.requires_grad)}"

    def fits(self, value: object) -> bool:
        """Whether ``value`` is a tensor of this shape and dtype."""
        return isinstance(value, Tensor) and tuple(value.shape) == self.shape and value.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class Constant:
    """An input of the model that is no tensor: the graph holds for this one value."""

    name: str
    value: Any

    def describe(self) -> str:
        """For messages."""
        return f"{self.name} = {self.value!r}"

    def fits(self, value: object) -> bool:
        """Whether ``value`` is the one that the model was captured with."""
        return type(value) is type(self.value) and bool(value == self.value)


@dataclass(frozen=True, slots=True)
class Named:
    """A value among the model's results."""

    name: str


@dataclass(frozen=True, slots=True)
class StageBorder:
    """What a stage's module takes and returns.

    Attributes:
        inputs: names of the values that it takes, in order of its arguments.
        outputs: names of those that it returns.
        written: the inputs that it writes to.
        reused: the outputs that lie in memory of its own that the next microbatch writes to.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    written: frozenset[str] = frozenset()
    reused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Tied:
    """One parameter in several stages: its original names, and the stages that hold it, ascending."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    value: Value


@dataclass(frozen=True)
class Routes:
    """Everything that crosses borders.

    Attributes:
        borders: of each stage.
        values: what crosses, by name (tied parameters under ``parameter:<name>``).
        forward: names by (producer stage, consumer stage).
        backward: names of the values whose gradients go from one stage to an earlier one, by (from, to).
        inputs: the model's own inputs, in order; stage 0 is given them.
        results: what the model returns, flat: names of values (as `Named`) and constants. The last stage has
            them all.
        tied: parameters that several stages hold.
        masked: whether some gradient may not be there at all (what the loss ignores). Then each message of
            gradients starts with a mask that says which are.
        tags: a number for each (name, from, to), the same on every rank.
    """

    borders: tuple[StageBorder, ...]
    values: Mapping[str, Value]
    forward: Mapping[tuple[int, int], tuple[str, ...]]
    backward: Mapping[tuple[int, int], tuple[str, ...]]
    inputs: tuple[Value | Constant, ...]
    results: tuple[Any, ...]
    tied: tuple[Tied, ...] = ()
    masked: bool = True
    tags: Mapping[tuple[str, int, int], int] = field(default_factory=dict, repr=False)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.borders)

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """Pairs (earlier stage, later stage) between which anything crosses, in either direction."""
        return frozenset(self.forward) | {(to, start) for start, to in self.backward}

    @property
    def result_names(self) -> tuple[str, ...]:
        """Names of the values among the results, each once."""
        return tuple(dict.fromkeys(item.name for item in self.results if isinstance(item, Named)))

    def describe(self) -> str:
        """All of it as text, equal where two cuts are interchangeable."""
        values = "; ".join(value.describe() for value in (*self.values.values(), *self.inputs))
        ways = f"{dict(self.forward)} {dict(self.backward)} {self.masked}"
        return f"{self.borders} {ways} {self.results} {values}"


def make_routes(
    borders: Iterable[StageBorder],
    producers: Mapping[str, int],
    values: Mapping[str, Any],
    inputs: Iterable[Value | Constant],
    results: Iterable[Any],
    tied: Iterable[Tied] = (),
) -> Routes:
    """Work out what crosses where.

    Args:
        producers: the stage that makes each value (0 for the model's inputs).
        values: a fake or real tensor for each value that may cross.

    Returns:
        Masked routes; the caller may know better.
    """
    borders, results, tied = tuple(borders), tuple(results), tuple(tied)
    forward: dict[tuple[int, int], list[str]] = {}
    backward: dict[tuple[int, int], list[str]] = {}
    crossing: dict[str, Value] = {}
    for name, users in _users(borders, results).items():
        producer = producers[name]
        consumers = sorted(users - {producer})
        if not consumers:
            continue
        crossing[name] = value = Value.of(name, values[name])
        for consumer in consumers:
            forward.setdefault((producer, consumer), []).append(name)
        if value.requires_grad:
            _chain(backward, name, [producer, *consumers])
    for group in tied:
        crossing[group.value.name] = group.value
        if group.value.requires_grad:
            _chain(backward, group.value.name, group.stages)
    links = sorted(
        (name, *pair) for way in (forward, backward) for pair, names in way.items() for name in (*names, MASK)
    )
    return Routes(
        borders=borders,
        values=crossing,
        forward={pair: tuple(names) for pair, names in sorted(forward.items())},
        backward={pair: tuple(names) for pair, names in sorted(backward.items())},
        inputs=tuple(inputs),
        results=results,
        tied=tied,
        tags={link: number for number, link in enumerate(links)},
    )


def accept(expected: Sequence[Value | Constant], given: Sequence[Any], who: str) -> None:
    """Check a model's flat inputs.

    Raises:
        SignatureMismatch: another number of inputs, another shape or dtype, another constant.
    """
    if len(given) != len(expected):
        raise SignatureMismatch(f"the model takes {len(expected)} inputs, {who} brings {len(given)}")
    for wanted, value in zip(expected, given, strict=True):
        if wanted.fits(value):
            continue
        found = describe(value) if isinstance(wanted, Value) else repr(value)
        raise SignatureMismatch(
            f"{who} brings {found} for {wanted.describe()}: give what the model was captured with (batches "
            "that divide into microbatches of that size), or cut it again with other example arguments"
        )


def describe(value: object) -> str:
    """A tensor's dtype, shape and gradient flag, or the type of anything else, for messages."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return _text(value.dtype, tuple(value.shape), value.requires_grad)


def _text(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{', with gradient' if requires_grad else ''}"


def _users(borders: Sequence[StageBorder], results: Sequence[Any]) -> dict[str, set[int]]:
    users: dict[str, set[int]] = {}
    for stage, border in enumerate(borders):
        for name in border.inputs:
            users.setdefault(name, set()).add(stage)
    for result in results:
        if isinstance(result, Named):
            users.setdefault(result.name, set()).add(len(borders) - 1)
    return users


def _chain(backward: dict[tuple[int, int], list[str]], name: str, stages: Sequence[int]) -> None:
    for earlier, later in pairwise(stages):
        backward.setdefault((later, earlier), []).append(name)
