"""Symbolic sizes of a graph: the batch, what is a multiple of it, and what the graph was traced for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from partita._torch.export.open_sizes import is_symbolic

__all__ = ["BatchSize", "find_batch"]


@dataclass(frozen=True)
class BatchSize:
    """The size of the batch, as one symbol of a graph.

    Attributes:
        symbol: in torch's shape expressions.
        shapes: torch's shape environment of the graph: the guards and ranges of all symbols.
    """

    symbol: sympy.Symbol
    shapes: ShapeEnv

    def within(self, value: Any) -> bool:
        """Whether a number, a shape, or what holds some, depends on the batch size."""
        return any(self.symbol in expression.free_symbols for expression in map(_expression, _numbers(value)))

    def factor(self, size: Any) -> Any:
        """Return ``k`` where ``size`` is ``k`` batches and ``k`` does not depend on the batch; else None."""
        quotient = sympy.expand(_expression(size) / self.symbol)
        return None if self.symbol in quotient.free_symbols else quotient

    def product(self, sizes: Sequence[Any]) -> Any:
        """Return the product of sizes in a normal form: equal products compare equal."""
        return sympy.expand(sympy.Mul(*map(_expression, sizes)))

    def at(self, value: Any, size: int, others: dict[Any, int]) -> int:
        """Return what a symbolic number of the graph is for a batch of ``size``.

        Args:
            others: the values of the other symbols.
        """
        return int(_expression(value).subs({**others, self.symbol: size}))

    def allows(self, size: int) -> bool:
        """Whether no guard of the graph's trace excludes batches of this size."""
        bounds = self.shapes.var_to_range.get(self.symbol)
        if bounds is not None and not (bool(bounds.lower <= size) and bool(size <= bounds.upper)):
            return False
        return all(guard.expr.subs({self.symbol: size}) != sympy.false for guard in self.shapes.guards)


def find_batch(gm: GraphModule) -> BatchSize | str:
    """Return the batch size of the graph's inputs, which is their size 0; or why there is none."""
    symbols: dict[sympy.Symbol, str] = {}
    shapes: ShapeEnv | None = None
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        size = value.shape[0]
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            if not isinstance(expression, sympy.Symbol):
                return f"the input {node.name!r} has the size {expression} there, which is no batch size"
            symbols.setdefault(expression, node.name)
            shapes = size.node.shape_env
    if not symbols or shapes is None:
        return "no input has a size there that may change: compile with dynamic=True"
    if len(symbols) > 1:
        names = " and ".join(repr(name) for name in list(symbols.values())[:2])
        return f"the inputs {names} have sizes there that are independent of each other"
    return BatchSize(next(iter(symbols)), shapes)


def _numbers(value: Any) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Node):
            leaf = leaf.meta.get("val")
        if isinstance(leaf, torch.Tensor):
            yield from leaf.shape
        elif is_symbolic(leaf):
            yield leaf


def _expression(value: Any) -> Any:
    if is_symbolic(value):
        return value.node.expr
    return sympy.Integer(value) if isinstance(value, int) else sympy.sympify(value)
