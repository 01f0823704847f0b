"""Sizes that a captured graph leaves open, and what it says about them.

A graph that was captured with a batch of 2 and runs with 6 has shapes such as ``[batch, 8]`` and numbers such
as ``batch * 2``. They are kept beside the graph, whose own metadata has the example's sizes::

    x: float32[2, 8]      shapes  {"x": (Size("batch"), 8)}
    h = a(x)              numbers {"sym_size_int": Size("batch")}
    h / x.shape[0]        symbols (Symbol("batch", "x", 0),)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from partita._torch.export.open_sizes import constant_size
from partita.errors import SignatureMismatch

__all__ = ["Condition", "Size", "Sizes", "Symbol", "evaluated", "sizes_of"]

_KEY = "partita_sizes"
_KNOWN: dict[str, Any] = {"math": math, "torch": torch, "min": min, "max": max, "abs": abs, "int": int}


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<size>", "eval")


@dataclass(frozen=True, slots=True)
class Size:
    """A number that follows from the sizes of the inputs.

    >>> Size("batch * 2").at({"batch": 3})
    6
    """

    text: str

    def at(self, sizes: Mapping[str, int]) -> Any:
        """Its value where the inputs have these sizes (by name)."""
        return eval(
            _compiled(self.text), {"__builtins__": {}, **_KNOWN}, dict(sizes)
        )  # capture made the text

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size that is open: its name, and where it is read: the dimension of an input (by name)."""

    name: str
    input: str
    dim: int


@dataclass(frozen=True, slots=True)
class Condition:
    """What must hold for the graph to be the model.

    Attributes:
        text: an expression over the sizes' names.
        where: the line that asked for it.
        training: the mode in which it was asked for; None: in both.
        strict: the expression that the model asked for, where the text lets a batch of one pass as well; that
            needs a proof.
    """

    text: str
    where: str
    training: bool | None = None
    strict: str = ""

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the sizes meet it."""
        return bool(Size(self.text).at(sizes))


@dataclass(frozen=True)
class Sizes:
    """What a captured graph says about sizes.

    Attributes:
        symbols: the open ones.
        shapes: of each tensor that has an open one, by node.
        numbers: of each node whose value is a number that follows from them.
        conditions: what must hold.
        fixed: why a size that was to be open is not; empty where nothing was tried, or all of it worked.
    """

    symbols: tuple[Symbol, ...] = ()
    shapes: Mapping[str, tuple[int | Size, ...]] = field(default_factory=dict)
    numbers: Mapping[str, Size] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    fixed: str = ""

    @classmethod
    def of(cls, gm: GraphModule) -> Sizes:
        """Those of a captured graph; empty ones for any other."""
        found = gm.meta.get(_KEY)
        return found if isinstance(found, Sizes) else cls()

    def __deepcopy__(self, memo: dict[int, object]) -> Sizes:
        """Itself: it never changes."""
        return self

    def attach(self, gm: GraphModule) -> None:
        """Keep them with a graph, in place."""
        gm.meta[_KEY] = self

    def check(self, sizes: Mapping[str, int], training: bool | None = None) -> None:
        """Refuse sizes for which the graph is not the model.

        Args:
            training: the mode in which it will run; None: both, or not known.

        Raises:
            SignatureMismatch: names the sizes, the condition, and the line that asked for it.
        """
        for condition in self.conditions:
            asked = None in (training, condition.training) or training == condition.training
            if asked and not condition.holds(sizes):
                given = ", ".join(f"{name} is {size}" for name, size in sizes.items())
                asker = f" (asked for by {condition.where})" if condition.where else ""
                raise SignatureMismatch(
                    f"{given}, but the graph was captured for {condition.text}{asker}: use sizes that meet "
                    "it, or capture the model with an example of this size"
                )

    @property
    def waived(self) -> bool:
        """Whether a batch of one passes conditions that the model's own do not let pass."""
        return any(condition.strict for condition in self.conditions)

    def strictly(self) -> Sizes:
        """With the model's own conditions."""
        own = [replace(one, text=one.strict or one.text, strict="") for one in self.conditions]
        return replace(self, conditions=tuple(own))

    def with_one(self) -> Sizes:
        """With a batch of one let through for good."""
        says_nothing = {text for one in self.symbols for text in (f"{one.name} != 1", f"1 != {one.name}")}
        kept = [one for one in self.conditions if one.strict not in says_nothing or len(self.symbols) > 1]
        return replace(self, conditions=tuple(replace(one, strict="") for one in kept))

    def in_terms_of(self, other: Sizes) -> Sizes | None:
        """The same with the open sizes of another graph of the same model, in which some of these are one (a
        way that adds a mask to scores needs them to have the same batch); None where it has others.
        """
        if self.symbols == other.symbols:
            return self
        if len(self.symbols) < len(other.symbols):
            return None
        names: dict[str, str] = {}
        for symbol in self.symbols:
            shape = other.shapes.get(symbol.input, ())
            size = shape[symbol.dim] if symbol.dim < len(shape) else None
            if not isinstance(size, Size):
                return None
            names[symbol.name] = f"({size.text})" if not size.text.isidentifier() else size.text

        def said(size: Size) -> Size:
            return Size(_renamed(size.text, names))

        def dimension(size: int | Size) -> int | Size:
            if not isinstance(size, Size):
                return size
            size = said(size)
            constant = constant_size(size.text)  # such as batch * 8 // other, where they are the same now
            return size if constant is None else constant

        return replace(
            self,
            symbols=other.symbols,
            shapes={node: tuple(map(dimension, shape)) for node, shape in self.shapes.items()},
            numbers={node: said(number) for node, number in self.numbers.items()},
            conditions=tuple(
                replace(one, text=_renamed(one.text, names), strict=_renamed(one.strict, names))
                for one in self.conditions
            ),
        )

    def joined(self, other: Sizes) -> Sizes:
        """Those of one graph for both modes, from those of the graph in training and in evaluation."""
        shared = {(condition.text, condition.where) for condition in self.conditions} & {
            (condition.text, condition.where) for condition in other.conditions
        }
        both = [
            replace(condition, training=None if (condition.text, condition.where) in shared else mode)
            for mode, sizes in ((True, self), (False, other))
            for condition in sizes.conditions
        ]
        return replace(self, conditions=tuple(dict.fromkeys(both)), fixed=self.fixed or other.fixed)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda word: names.get(word[0], word[0]), text)


def sizes_of(symbols: Sequence[Symbol], names: Sequence[str], flat: Sequence[Any]) -> dict[str, int]:
    """The sizes that a model's flat inputs have.

    Args:
        names: of the inputs.
    """
    given = dict(zip(names, flat, strict=False))
    found = {}
    for symbol in symbols:
        value = given.get(symbol.input)
        if not isinstance(value, torch.Tensor) or value.dim() <= symbol.dim:
            raise SignatureMismatch(
                f"the input {symbol.input!r} is {_described(value)}, but the model was captured with a "
                f"tensor of more than {symbol.dim} dimensions there: give what the model was captured with"
            )
        found[symbol.name] = int(value.shape[symbol.dim])
    return found


def evaluated(shape: Sequence[int | Size], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape for these sizes.

    >>> evaluated((Size("batch"), 8), {"batch": 6})
    (6, 8)
    """
    value: Callable[[Size], Any] = lambda size: size.at(sizes)  # noqa: E731
    return tuple(value(size) if isinstance(size, Size) else size for size in shape)


def _described(value: object) -> str:
    return (
        f"a tensor of {value.dim()} dimensions" if isinstance(value, torch.Tensor) else type(value).__name__
    )
