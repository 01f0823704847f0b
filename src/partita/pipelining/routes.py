"""Who needs which value from whom: all that the ranks of a pipeline must agree on, as data.

A value goes straight from its producer to every stage that uses it. Its gradient comes back along the chain of its users, last
first, each adding its own share, so that contributions are summed in the order in which autograd sums them in the uncut model::

    forward    0 ---> 1        backward    0 <--- 1
               0 -------> 3                       1 <------ 3

A parameter that several stages hold travels the same way backwards (its value does not travel: each stage has it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Named", "Routes", "StageBorder", "Tied", "Value", "describe", "make_routes"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses a border: what the receiving side must make room for.

    ``requires_grad``: whether a gradient comes back for it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def describe(self) -> str:
        """For messages."""
        return f"{self.name}: {_text(self.dtype, self.shape, self.requires_grad)}"


@dataclass(frozen=True, slots=True)
class Named:
    """A value among the model's results."""

    name: str


@dataclass(frozen=True, slots=True)
class StageBorder:
    """Names of the values that a stage's module takes, in order of its arguments, and of those it returns."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


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
        inputs: the model's own inputs, in order (None for one that is no tensor); stage 0 is given them.
        results: what the model returns, flat: names of values (as `Named`) and constants. The last stage has them all.
        tied: parameters that several stages hold.
    """

    borders: tuple[StageBorder, ...]
    values: Mapping[str, Value]
    forward: Mapping[tuple[int, int], tuple[str, ...]]
    backward: Mapping[tuple[int, int], tuple[str, ...]]
    inputs: tuple[Value | None, ...]
    results: tuple[Any, ...]
    tied: tuple[Tied, ...] = ()
    tags: Mapping[tuple[str, int, int], int] = field(default_factory=dict, repr=False)
    """A number for each (name, from, to), the same on every rank."""

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.borders)

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """Pairs (earlier stage, later stage) between which anything crosses, in either direction."""
        return frozenset(self.forward) | {(to, start) for start, to in self.backward}


def make_routes(
    borders: Iterable[StageBorder],
    producers: Mapping[str, int],
    values: Mapping[str, Any],
    inputs: Iterable[str],
    results: Iterable[Any],
    tied: Iterable[Tied] = (),
) -> Routes:
    """Work out what crosses where.

    Args:
        producers: the stage that makes each value (0 for the model's inputs).
        values: a fake or real tensor for each value that may cross.
    """
    borders, results, tied = tuple(borders), tuple(results), tuple(tied)
    last = len(borders) - 1
    users: dict[str, dict[int, None]] = {}
    for stage, border in enumerate(borders):
        for name in border.inputs:
            users.setdefault(name, {})[stage] = None
    for result in results:
        if isinstance(result, Named):
            users.setdefault(result.name, {})[last] = None
    forward: dict[tuple[int, int], list[str]] = {}
    backward: dict[tuple[int, int], list[str]] = {}
    crossing: dict[str, Value] = {}
    for name, stages in users.items():
        producer = producers[name]
        consumers = sorted(stage for stage in stages if stage != producer)
        if not consumers:
            continue
        crossing[name] = value = _describe(name, values[name])
        for consumer in consumers:
            forward.setdefault((producer, consumer), []).append(name)
        if value.requires_grad:
            _chain(backward, name, [producer, *consumers])
    for group in tied:
        crossing[group.value.name] = group.value
        if group.value.requires_grad:
            _chain(backward, group.value.name, group.stages)
    links = [(name, *pair) for way in (forward, backward) for pair, names in sorted(way.items()) for name in sorted(names)]
    return Routes(
        borders=borders,
        values=crossing,
        forward={pair: tuple(names) for pair, names in sorted(forward.items())},
        backward={pair: tuple(names) for pair, names in sorted(backward.items())},
        inputs=tuple(_describe(name, values[name]) if isinstance(values[name], torch.Tensor) else None for name in inputs),
        results=results,
        tied=tied,
        tags={link: number for number, link in enumerate(sorted(links))},
    )


def describe(value: object) -> str:
    """A tensor's dtype, shape and gradient flag, or the type of anything else, for messages."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return _text(value.dtype, tuple(value.shape), value.requires_grad)


def _text(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{', with gradient' if requires_grad else ''}"


def _describe(name: str, tensor: torch.Tensor) -> Value:
    return Value(name, tuple(tensor.shape), tensor.dtype, bool(tensor.requires_grad))


def _chain(backward: dict[tuple[int, int], list[str]], name: str, stages: Iterable[int]) -> None:
    ordered = list(stages)
    for earlier, later in zip(ordered, ordered[1:], strict=False):
        backward.setdefault((later, earlier), []).append(name)
