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
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from partita._torch.export.export import Signature
from partita.capture.sizes import Size, Sizes, Symbol, evaluated, sizes_of
from partita.errors import SignatureMismatch

__all__ = [
    "TRAILER",
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

TRAILER = ""
"""Among the tags: the name of a message's trailer (see ``layout``)."""

_KEPT = 256
"""For how many sizes routes are kept."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses a border: what the receiving side must make room for.

    Attributes:
        shape: numbers, or expressions over the sizes that are open (see `Routes.at`).
        requires_grad: whether a gradient comes back for it.
        fixed: for an input of the model: why its sizes are not open.
        bundle: several tensors in one, which nobody can make room for before they come.
    """

    name: str
    shape: tuple[int | Size, ...]
    dtype: torch.dtype
    requires_grad: bool
    fixed: str = field(default="", compare=False)
    bundle: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor, sizes: Sizes | None = None) -> Value:
        """What ``tensor`` looks like, under that name; with the sizes that are open where a graph has
        some.
        """
        shape: tuple[int | Size, ...] = tuple(tensor.shape)
        if sizes is not None:
            shape = sizes.shapes.get(name, shape)
        return cls(name, shape, tensor.dtype, bool(tensor.requires_grad))

    def at(self, sizes: Mapping[str, int]) -> Value:
        """The same with every size a number."""
        return replace(self, shape=evaluated(self.shape, sizes))

    def describe(self) -> str:
        """For messages."""
        return f"{self.name}: {_text(self.dtype, self.shape, self.requires_grad)}"

    def fits(self, value: object) -> bool:
        """Whether ``value`` is a tensor of this shape and dtype; a size that is open may be any."""
        if not isinstance(value, Tensor) or value.dtype != self.dtype:
            return False
        if value.shape == self.shape:
            return True
        return len(value.shape) == len(self.shape) and all(
            size == wanted or isinstance(wanted, Size)
            for size, wanted in zip(value.shape, self.shape, strict=True)
        )


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
        inputs: names of the values that it takes, in order of its arguments: tensors, and numbers (see
            ``Routes.numbers``).
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
    """One parameter in several stages: its original names, and the stages that hold it, ascending.

    ``chained``: its gradient travels along these stages with each microbatch, last first; if not, they sum it
    once a step.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    value: Value
    chained: bool = True


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
        tags: a number for each (name, from, to), the same on every rank.
        parameters: all names of the model's parameters, in its own order.
        numbers: values that stages take and that follow from the sizes of the model's inputs: they are worked
            out on each rank and not sent.
        sizes: which sizes are open, and what they must meet. See `at`.
        evaluation: what crosses in evaluation, where the model takes another path there; see `in_mode`.
        signature: how results are put together, where not as the stages' own signature says.
        structure: of the whole model, as text; empty where nobody has seen it whole.
    """

    borders: tuple[StageBorder, ...]
    values: Mapping[str, Value]
    forward: Mapping[tuple[int, int], tuple[str, ...]]
    backward: Mapping[tuple[int, int], tuple[str, ...]]
    inputs: tuple[Value | Constant, ...]
    results: tuple[Any, ...]
    tied: tuple[Tied, ...] = ()
    tags: Mapping[tuple[str, int, int], int] = field(default_factory=dict, repr=False)
    parameters: tuple[str, ...] = field(default=(), repr=False)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)
    evaluation: Routes | None = None
    signature: Signature | None = field(default=None, repr=False, compare=False)
    structure: tuple[str, ...] = field(default=(), repr=False, compare=False)
    _made: dict[Any, Routes] = field(default_factory=dict, repr=False, compare=False)

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

    def in_mode(self, training: bool) -> Routes:
        """What crosses in that mode; itself where both modes are alike."""
        return self if training or self.evaluation is None else self.evaluation

    @property
    def modes(self) -> tuple[Routes, ...]:
        """Itself, and that of evaluation where it is another."""
        return (self,) if self.evaluation is None else (self, self.evaluation)

    @property
    def bundled(self) -> bool:
        """Whether what crosses is known only when it comes."""
        return any(value.bundle for value in self.values.values())

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The sizes that are open; empty where the routes hold for the example's sizes only."""
        return self.sizes.symbols

    def sizes_of(self, flat: Sequence[Any]) -> tuple[int, ...]:
        """The open sizes as a model's flat inputs have them, in the order of `symbols`.

        Raises:
            SignatureMismatch: an input has too few dimensions.
        """
        return tuple(sizes_of(self.symbols, [value.name for value in self.inputs], flat).values())

    def at(self, sizes: Sequence[int], training: bool | None = None) -> Routes:
        """The routes of a microbatch of these sizes: every shape, number and result is plain. Itself where no
        size is open.

        Args:
            sizes: from `sizes_of`.
            training: the mode in which the stages will run; None where it is not known.

        Raises:
            SignatureMismatch: sizes for which the graph is not the model; names the line that says so.
        """
        if not self.symbols:
            return self
        key = (tuple(sizes), training)
        if key not in self._made:
            if len(self._made) >= _KEPT:
                self._made.clear()
            named = {symbol.name: size for symbol, size in zip(self.symbols, sizes, strict=True)}
            self.sizes.check(named, training)
            self._made[key] = self._evaluated(named)
        return self._made[key]

    def _evaluated(self, named: Mapping[str, int]) -> Routes:
        def plain(item: Any) -> Any:
            return item.at(named) if isinstance(item, (Size, Value)) else item

        return replace(
            self,
            values={name: value.at(named) for name, value in self.values.items()},
            inputs=tuple(plain(value) for value in self.inputs),
            results=tuple(plain(item) for item in self.results),
            tied=self.tied,
            numbers={name: plain(value) for name, value in self.numbers.items()},
            sizes=Sizes(),
            evaluation=None,
            _made={},
        )

    def describe(self) -> str:
        """All of it as text, equal where two cuts are interchangeable."""
        values = "; ".join(value.describe() for value in (*self.values.values(), *self.inputs))
        ways = f"{dict(self.forward)} {dict(self.backward)}"
        return f"{self.borders} {ways} {self.results} {values} {dict(self.numbers)}" + (
            "" if self.evaluation is None else f" in evaluation: {self.evaluation.describe()}"
        )


def make_routes(
    borders: Iterable[StageBorder],
    producers: Mapping[str, int],
    values: Mapping[str, Any],
    inputs: Iterable[Value | Constant],
    results: Iterable[Any],
    tied: Iterable[Tied] = (),
    sizes: Sizes | None = None,
) -> Routes:
    """Work out what crosses where.

    Args:
        producers: the stage that makes each value (0 for the model's inputs).
        values: a fake or real tensor for each value that may cross.
        sizes: what the graph leaves open.
    """
    borders, results, tied = tuple(borders), tuple(results), tuple(tied)
    forward: dict[tuple[int, int], list[str]] = {}
    backward: dict[tuple[int, int], list[str]] = {}
    crossing: dict[str, Value] = {}
    sizes = sizes or Sizes()
    for name, users in _users(borders, results).items():
        if name in sizes.numbers:
            continue
        producer = producers[name]
        consumers = sorted(users - {producer})
        if not consumers:
            continue
        crossing[name] = value = Value.of(name, values[name], sizes)
        for consumer in consumers:
            forward.setdefault((producer, consumer), []).append(name)
        if value.requires_grad:
            _chain(backward, name, [producer, *consumers])
    for group in tied:
        crossing[group.value.name] = group.value
        if group.value.requires_grad:
            _chain(backward, group.value.name, group.stages)
    ways = (*forward.items(), *backward.items())
    links = sorted((name, *pair) for pair, names in ways for name in (*names, TRAILER))
    return Routes(
        borders=borders,
        values=crossing,
        forward={pair: tuple(names) for pair, names in sorted(forward.items())},
        backward={pair: tuple(names) for pair, names in sorted(backward.items())},
        inputs=tuple(inputs),
        results=results,
        tied=tied,
        tags={link: number for number, link in enumerate(links)},
        numbers={
            name: sizes.numbers[name] for border in borders for name in border.inputs if name in sizes.numbers
        },
        sizes=replace(sizes, shapes={}, numbers={}),
    )


def accept(expected: Sequence[Value | Constant], given: Sequence[Any], who: str) -> None:
    """Check a model's flat inputs.

    Raises:
        SignatureMismatch: another number of inputs, another shape or dtype, another constant.
    """
    if len(given) != len(expected):
        raise SignatureMismatch(f"the model takes {len(expected)} inputs, {who} brings {len(given)}")
    sizes = _bound(expected, given)
    for wanted, value in zip(expected, given, strict=True):
        if (wanted.at(sizes) if sizes and isinstance(wanted, Value) else wanted).fits(value):
            continue
        found = describe(value) if isinstance(wanted, Value) else repr(value)
        fixed = wanted.fixed if isinstance(wanted, Value) else ""
        here = ", ".join(f"{name} is {size}" for name, size in sizes.items())
        raise SignatureMismatch(
            f"{who} brings {found} for {wanted.describe()}{f' where {here}' if here else ''}: give what the "
            "model was captured with"
            + (f", whose sizes are fixed, because of: {fixed}; or" if fixed else ", or")
            + " cut it again with other example arguments"
        )


def _bound(expected: Sequence[Value | Constant], given: Sequence[Any]) -> dict[str, int]:
    """The open sizes, as the first input that has each of them says; 0 where it does not have that
    dimension.
    """
    found: dict[str, int] = {}
    for wanted, value in zip(expected, given, strict=True):
        for dim, size in enumerate(wanted.shape if isinstance(wanted, Value) else ()):
            if isinstance(size, Size) and size.text.isidentifier():
                known = isinstance(value, Tensor) and dim < value.dim()
                found.setdefault(size.text, int(value.shape[dim]) if known else 0)
    return found


def describe(value: object) -> str:
    """A tensor's dtype, shape and gradient flag, or the type of anything else, for messages."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return _text(value.dtype, tuple(value.shape), value.requires_grad)


def _text(dtype: torch.dtype, shape: tuple[int | Size, ...], requires_grad: bool) -> str:
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
