"""Where the rows of a batch are in a tensor, and one call of an operator as the rules about rows see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from partita._torch.export.batch_size import BatchSize
from partita.graph.effects import metadata

__all__ = ["RowCall", "RowMixing", "Rows", "RowsOf", "rows_by_shape"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of the batch are in one tensor.

    Attributes:
        dim: the dimension, from 0.
        block: how many places of it belong to one row; a number or an expression.
    """

    dim: int
    block: Any = 1


class RowMixing(Exception):
    """Rows of the batch meet, or may meet; the text says where and why."""


RowsOf: TypeAlias = Callable[[Node], Any]
"""The rows of a node's value; a tuple for several results."""


class RowCall:
    """One call.

    Attributes:
        operands: the nodes that it takes.
        rows: those of each operand, None where it has none.
        value: the example value of its result.
    """

    def __init__(self, node: Node, rows_of: RowsOf, batch: BatchSize) -> None:
        self.node = node
        self.batch = batch
        self.operands = tuple(node.all_input_nodes)
        self.rows = [rows_of(operand) for operand in self.operands]
        self.value = metadata(node)
        self._rows_of = rows_of
        schema = getattr(node.target, "_schema", None)
        arguments = schema.arguments if schema is not None else []
        self._named: dict[str, Any] = {
            **{argument.name: argument.default_value for argument in arguments},
            **dict(zip([argument.name for argument in arguments], node.args, strict=False)),
            **node.kwargs,
        }

    @property
    def rank(self) -> int:
        """Dimensions of its result, or of the first of several."""
        value = self.value[0] if isinstance(self.value, (tuple, list)) else self.value
        return int(value.dim())

    @property
    def takes_batch_size(self) -> bool:
        """Whether one of its numbers depends on the batch size."""
        leaves = _leaves((*self.node.args, *self.node.kwargs.values()))
        return self.batch.within([leaf for leaf in leaves if not _is_tensor(leaf)])

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        return self._named.get(name, default)

    def rows_of(self, argument: Any) -> Rows | None:
        """The rows of a tensor argument."""
        return self._rows_of(argument) if isinstance(argument, Node) else None

    def shape(self, argument: Any) -> Any:
        """The shape of a tensor argument."""
        return metadata(argument).shape

    def rows_of_first(self, otherwise: str = "an operand besides its first has the batch too") -> Rows:
        """The rows of the first operand, where no other has any; else raise `RowMixing`."""
        rows = self.rows[0]
        if rows is None or any(self.rows[1:]):
            raise RowMixing(otherwise)
        return rows

    def dim_of(self, argument: Any, dim: int) -> int:
        """A dimension of a tensor argument, counted from 0."""
        return dim + len(self.shape(argument)) if dim < 0 else dim

    def refuse_batch_size(self, *names: str) -> None:
        """Raise where one of these arguments depends on the batch size."""
        for name in names:
            if self.batch.within(self.get(name)):
                raise RowMixing(f"its argument {name!r} depends on the batch size")

    def same_in_each_result(self, rows: Rows | None) -> Any:
        """These rows, for each result where there are several."""
        return tuple(rows for _ in self.value) if isinstance(self.value, (tuple, list)) else rows

    def batch_first_in_results(self, rows: Rows) -> Any:
        """These rows, for each result whose first dimension depends on the batch size."""
        if not isinstance(self.value, (tuple, list)):
            return rows
        return tuple(
            rows
            if isinstance(part, torch.Tensor) and part.dim() and self.batch.within(part.shape[0])
            else None
            for part in self.value
        )

    def broadcast_rows(self, operands: Iterable[Any], rank: int) -> Rows | None:
        """The rows of operands that are broadcast together to ``rank`` dimensions."""
        from_the_end: set[tuple[int, Any]] = set()
        for operand in operands:
            rows = self.rows_of(operand)
            if rows is not None:
                from_the_end.add((rows.dim - len(self.shape(operand)), rows.block))
        if len(from_the_end) > 1:
            raise RowMixing("its operands have the batch in different dimensions")
        return next((Rows(dim + rank, block) for dim, block in from_the_end), None)


def rows_by_shape(value: torch.Tensor, batch: BatchSize) -> Rows | None:
    """The only dimension of a tensor that is a multiple of the batch; None for none, and for several."""
    dims = [dim for dim, size in enumerate(value.shape) if batch.within(size)]
    block = batch.factor(value.shape[dims[0]]) if len(dims) == 1 else None
    return None if block is None else Rows(dims[0], block)


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, (list, tuple)) else [value]


def _is_tensor(argument: Any) -> bool:
    return isinstance(metadata(argument) if isinstance(argument, Node) else argument, torch.Tensor)
