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

__all__ = ["BatchSize", "find_batch"]


@dataclass(frozen=True)
class BatchSize:
    """The size of the batch, as one symbol of a graph.

    Attributes:
        symbol: in torch's shape expressions.
        shapes: what is known of all symbols of the graph.
    """

    symbol: sympy.Symbol
    shapes: ShapeEnv

    def within(self, value: Any) -> bool:
        """Whether a number, a shape, or what holds some, depends on the batch size."""
        return any(self.symbol in expression.free_symbols for expression in map(_expression, _numbers(value)))

    def factor(self, size: Any) -> Any:
        """``k`` where ``size`` is ``k`` batches and ``k`` does not depend on the batch; else None."""
        quotient = sympy.expand(_expression(size) / self.symbol)
        return None if self.symbol in quotient.free_symbols else quotient

    def product(self, sizes: Sequence[Any]) -> Any:
        """The product of sizes, in a form in which equal products are equal."""
        return sympy.expand(sympy.Mul(*map(_expression, sizes)))

    def at(self, value: Any, size: int, known: dict[Any, int]) -> int:
        """A number of the graph for a batch of ``size``.

        Args:
            known: the other symbols.
        """
        return int(_expression(value).subs({**known, self.symbol: size}))

    def allows(self, size: int) -> bool:
        """Whether the graph was traced for batches of this size too: no guard speaks against it."""
        bounds = self.shapes.var_to_range.get(self.symbol)
        if bounds is not None and not (bool(bounds.lower <= size) and bool(size <= bounds.upper)):
            return False
        return all(guard.expr.subs({self.symbol: size}) != sympy.false for guard in self.shapes.guards)


def find_batch(gm: GraphModule, dim: int = 0) -> BatchSize | str:
    """The symbol that stands at ``dim`` of the graph's inputs; or why there is none."""
    found: dict[sympy.Symbol, str] = {}
    shapes: ShapeEnv | None = None
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() <= dim:
            continue
        size = value.shape[dim]
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            if not isinstance(expression, sympy.Symbol):
                return f"the input {node.name!r} has the size {expression} there, which is no batch size"
            found.setdefault(expression, node.name)
            shapes = size.node.shape_env
    if not found or shapes is None:
        return "no input has a size there that may change: compile with dynamic=True"
    if len(found) > 1:
        names = " and ".join(repr(name) for name in list(found.values())[:2])
        return f"the inputs {names} have sizes there that are independent of each other"
    return BatchSize(next(iter(found)), shapes)


def _numbers(value: Any) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Node):
            leaf = leaf.meta.get("val")
        if isinstance(leaf, torch.Tensor):
            yield from leaf.shape
        elif isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield leaf


def _expression(value: Any) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    return sympy.Integer(value) if isinstance(value, int) else sympy.sympify(value)
