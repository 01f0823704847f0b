"""One call of an operator, with what the rules about rows ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from partita._torch.export.batch_size import BatchSize
from partita.cudagraphs.padding.rows import RowMixing, Rows
from partita.graph.effects import metadata
from partita.graph.use import nodes_in

__all__ = ["Places", "RowCall", "aligned", "flat", "in_each_result", "located", "no_rows"]

Places: TypeAlias = Callable[[Node], Any]
"""The rows of a node's value; a tuple for several results."""


class RowCall:
    """One call, with what the rules ask for."""

    def __init__(self, node: Node, places: Places, batch: BatchSize) -> None:
        self.node = node
        self.places = places
        self.batch = batch
        self.nodes = tuple(node.all_input_nodes)
        self.rows = [places(operand) for operand in self.nodes]
        self.value = metadata(node)
        schema = getattr(node.target, "_schema", None)
        arguments = schema.arguments if schema is not None else []
        self.named: dict[str, Any] = {
            **{argument.name: argument.default_value for argument in arguments},
            **dict(zip([argument.name for argument in arguments], node.args, strict=False)),
            **node.kwargs,
        }

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        return self.named.get(name, default)

    def rows_of(self, argument: Any) -> Rows | None:
        """The rows of a tensor argument."""
        return self.places(argument) if isinstance(argument, Node) else None

    def shape(self, argument: Any) -> Any:
        return metadata(argument).shape

    def dim_of(self, argument: Any, dim: int) -> int:
        """A dimension counted from 0."""
        rank = len(self.shape(argument))
        return dim + rank if dim < 0 else dim

    def numbers_free(self, *names: str) -> None:
        """These arguments must not depend on the batch size."""
        for name in names:
            if self.batch.within(
                [item for item in flat(self.get(name)) if not isinstance(item, Node)]
            ) or any(
                not isinstance(metadata(item), torch.Tensor) and self.batch.within(item)
                for item in nodes_in(self.get(name))
            ):
                raise RowMixing(f"its argument {name!r} depends on the batch size")


def flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, (list, tuple)) else [value]


def no_rows(call: RowCall) -> Any:
    return tuple(None for _ in call.value) if isinstance(call.value, (tuple, list)) else None


def in_each_result(call: RowCall, rows: Rows | None) -> Any:
    """The same rows for each result."""
    return tuple(rows for _ in call.value) if isinstance(call.value, (tuple, list)) else rows


def aligned(call: RowCall, operands: Any, rank: int) -> Rows | None:
    """The rows of operands that are broadcast together to ``rank`` dimensions."""
    found: set[tuple[int, Any]] = set()
    for operand in operands:
        rows = call.rows_of(operand)
        if rows is not None:
            found.add((rows.dim - len(call.shape(operand)), rows.block))
    if len(found) > 1:
        raise RowMixing("its operands have the batch in different dimensions")
    return next((Rows(dim + rank, block) for dim, block in found), None)


def located(call: RowCall) -> Any:
    sizes = [dim for dim, size in enumerate(call.value.shape) if call.batch.within(size)]
    if not sizes:
        return None
    block = call.batch.factor(call.value.shape[sizes[0]])
    if len(sizes) > 1 or block is None:
        raise RowMixing("more than one dimension of its result depends on the batch size")
    return Rows(sizes[0], block)
