"""Routes: which stage sends which value to which other. All ranks of a pipeline must have the same.

A value goes straight from its producer to every stage that uses it. Its gradient comes back along the chain
of its users, last first, each adding its own share, so that contributions are summed in the order in which
autograd sums them in the uncut model::

    forward    0 ---> 1        backward    0 <--- 1
               0 -------> 3                       1 <------ 3

Of a parameter that several stages hold the gradient travels the same way; its value does not travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from partita._torch.export.signature import Signature
from partita.capture.open_sizes.sizes import Size, Sizes, Symbol, sizes_of
from partita.pipelining.interface.values import Constant, Value

__all__ = [
    "TRAILER",
    "Named",
    "Routes",
    "StageBorder",
    "Tied",
    "TiedGradients",
    "make_routes",
]

TRAILER = ""
"""The name of a message's trailer among the tags (see ``layout``)."""

TiedGradients: TypeAlias = Literal["exact", "reduced"]
"""Whether the gradient of a parameter that several stages hold travels with each microbatch, and is bit for
bit that of the uncut model, or is summed once a step."""

_MOST_CACHED = 256
"""For how many combinations of sizes routes are cached."""


@dataclass(frozen=True, slots=True)
class Named:
    """A value among the model's results."""

    name: str


@dataclass(frozen=True, slots=True)
class StageBorder:
    """What a stage's module takes and returns.

    Attributes:
        inputs: the names of its arguments, in order: tensors, and numbers (see ``Routes.numbers``).
        outputs: the names of the values that it returns, in order.
        written: the inputs that it writes to.
        reused: the outputs that lie in its buffers and that the next microbatch overwrites.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    written: frozenset[str] = frozenset()
    reused: frozenset[str] = frozenset()

    def describe(self) -> str:
        """Return the border as text, which is the same in all processes."""
        return f"{self.inputs} {self.outputs} {sorted(self.written)} {sorted(self.reused)}"


@dataclass(frozen=True, slots=True)
class Tied:
    """One parameter in several stages.

    Attributes:
        names: its names in the model.
        stages: the stages that hold it, ascending.
        chained: whether its gradient travels along these stages with each microbatch, last first; if not,
            they sum it once a step.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    value: Value
    chained: bool = True


@dataclass(frozen=True)
class Routes:
    """All that crosses the borders of a pipeline's stages.

    Attributes:
        borders: what each stage takes and returns.
        values: what crosses, by name (tied parameters under ``parameter:<name>``).
        forward: names by (producer stage, consumer stage).
        backward: names of the values whose gradients go from one stage to an earlier one, by (from, to).
        inputs: the model's own inputs, in order, which stage 0 takes.
        results: what the model returns, flat: names of values (as `Named`) and constants. The last stage has
            all of them.
        tied: parameters that several stages hold.
        tags: a number for each (name, from, to), the same on every rank.
        parameters: all names of the model's parameters, in the model's order.
        numbers: arguments of stages that follow from the sizes of the model's inputs: each rank computes
            them, they are not sent.
        sizes: the open sizes and their conditions; see `at`.
        evaluation: the routes in evaluation, where the model takes another path there; see `in_mode`.
        signature: how the results are unflattened, where not by the stages' own signature.
        structure: the whole model as text; empty where no rank has seen the whole model.
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
    _by_sizes: dict[Any, Routes] = field(default_factory=dict, repr=False, compare=False)

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

    @property
    def only_returned(self) -> frozenset[str]:
        """The values that are sent to the last stage only for the model to return them."""
        used = {name for border in self.borders for name in border.inputs}
        return frozenset(name for name in self.result_names if name in self.values and name not in used)

    def passed_on(self, stage: int) -> frozenset[str]:
        """The inputs of a stage that get gradients from behind it too: from later stages, or, of results that
        are as they came, from the loss. Without those that it writes to.
        """
        border = self.borders[stage]
        behind = {name for (_, to), names in self.backward.items() if to == stage for name in names}
        if stage == self.stages - 1:
            behind.update(self.result_names)
        return frozenset(behind.intersection(border.inputs)) - border.written

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
        """Return the open sizes of the model's flat inputs, in the order of `symbols`.

        Raises:
            SignatureMismatch: an input has too few dimensions.
        """
        return tuple(sizes_of(self.symbols, [value.name for value in self.inputs], flat).values())

    def at(self, sizes: Sequence[int], training: bool | None = None) -> Routes:
        """Return the routes of a microbatch of these sizes, in which every size is a number. Without open
        sizes these are the routes themselves.

        Args:
            sizes: from `sizes_of`.
            training: the mode in which the stages will run; None where it is not known.

        Raises:
            SignatureMismatch: the graph is not right for these sizes; names the line of the model that
                decides it.
        """
        if not self.symbols:
            return self
        key = (tuple(sizes), training)
        if key not in self._by_sizes:
            if len(self._by_sizes) >= _MOST_CACHED:
                self._by_sizes.clear()
            named = {symbol.name: size for symbol, size in zip(self.symbols, sizes, strict=True)}
            self.sizes.check(named, training)
            self._by_sizes[key] = self._evaluated(named)
        return self._by_sizes[key]

    def _evaluated(self, named: Mapping[str, int]) -> Routes:
        def evaluated_item(item: Any) -> Any:
            return item.at(named) if isinstance(item, (Size, Value)) else item

        return replace(
            self,
            values={name: value.at(named) for name, value in self.values.items()},
            inputs=tuple(evaluated_item(value) for value in self.inputs),
            results=tuple(evaluated_item(item) for item in self.results),
            tied=self.tied,
            numbers={name: evaluated_item(value) for name, value in self.numbers.items()},
            sizes=Sizes(),
            evaluation=None,
            _by_sizes={},
        )

    def describe(self) -> str:
        """Return the routes as text, which is equal where two cuts are interchangeable."""
        borders = "; ".join(border.describe() for border in self.borders)
        values = "; ".join(value.describe() for value in (*self.values.values(), *self.inputs))
        ways = f"{dict(self.forward)} {dict(self.backward)}"
        return f"{borders} {ways} {self.results} {values} {dict(self.numbers)}" + (
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
    """Return the routes between stages with these borders.

    Args:
        producers: the stage that computes each value (0 for the model's inputs).
        values: a fake or real tensor, or its description, for each value that may cross.
        sizes: the sizes that the graph leaves open.
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
        value = values[name]
        crossing[name] = value = value if isinstance(value, Value) else Value.of(name, value, sizes)
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
