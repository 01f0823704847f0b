"""Does each row of a batch go through a graph by itself? Then the batch can be padded.

Each value is followed from the inputs on: which of its dimensions is the batch, if any. A dimension may hold
several batches' worth, each row a block (``view(batch * tokens, width)``). A node is let through only by a
rule that knows where the rows go; whatever has none, or sums, sorts or picks over the batch, ends the proof
with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.export.batch_size import BatchSize
from partita.cudagraphs.facts.origin import source_line
from partita.graph.effects import Effects, metadata

__all__ = ["RowMixing", "RowProof", "Rows", "follow_rows", "input_rows", "output_rows"]


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


@dataclass(frozen=True)
class RowProof:
    """Where the rows are in the inputs and outputs of a graph.

    Attributes:
        batch: the size of the batch.
        inputs: for each input its rows; None for one that is the same for all rows, and for a number.
        outputs: for each output likewise.
        sizes: which inputs are the batch size itself, as a number.
    """

    batch: BatchSize
    inputs: tuple[Rows | None, ...]
    outputs: tuple[Rows | None, ...]
    sizes: frozenset[int]


def follow_rows(gm: GraphModule, effects: Effects, batch: BatchSize, rules: Any) -> RowProof:
    """Follow the rows of the batch through a flat functional graph with example values.

    Args:
        effects: of the graph.
        rules: from a node, and a function from a node to its rows, to the rows of its result (a tuple for
            several results). Raises `RowMixing`.

    Raises:
        RowMixing: the rows meet.
    """
    inputs = input_rows(gm, batch)
    places: dict[Node, Any] = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    random = {effects.nodes[position] for position in effects.random}
    for node in effects.nodes:
        if node.op in ("placeholder", "output"):
            continue
        try:
            attention = "scaled_dot_product" in str(node.target)  # draws only where its rule refuses it
            if node in random and not attention and batch.within(metadata(node)):
                raise RowMixing("it draws random numbers, and more rows draw more of them")
            places[node] = None if node.op == "get_attr" else rules(node, places.__getitem__, batch)
        except RowMixing as why:
            source = source_line(node)
            raise RowMixing(
                f"{node.name} ({node.target}){f' at {source}' if source else ''}: {why}"
            ) from None
    outputs = tuple(places[item] if isinstance(item, Node) else None for item in _outputs(gm))
    return RowProof(batch, inputs, outputs, _sizes(gm, batch))


def input_rows(gm: GraphModule, batch: BatchSize) -> tuple[Rows | None, ...]:
    """Where the rows are in each input.

    Raises:
        RowMixing: an input is laid out such that padding would take more than rows at its end.
    """
    found: list[Rows | None] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = metadata(node)
        if not isinstance(value, torch.Tensor) or not batch.within(value.shape):
            if batch.within(value) and batch.factor(value) != 1:
                raise RowMixing(f"the input {node.name!r} is the number {value}, made of the batch size")
            found.append(None)
            continue
        rows = _located(value, batch)
        if rows is None or rows.block != 1 or batch.within(value.stride()):
            raise RowMixing(
                f"the input {node.name!r} of shape {tuple(value.shape)} and strides {value.stride()} has the "
                f"batch not as its outermost dimension in memory: pass it contiguous, batch first"
            )
        found.append(rows)
    return tuple(found)


def output_rows(gm: GraphModule, batch: BatchSize) -> RowProof:
    """Inputs and outputs as their shapes have them, without a proof.

    Raises:
        RowMixing: the batch is not one dimension of each that depends on it.
    """
    outputs: list[Rows | None] = []
    for item in _outputs(gm):
        value = metadata(item) if isinstance(item, Node) else item
        rows = _located(value, batch) if isinstance(value, torch.Tensor) else None
        if rows is None and batch.within(value):
            raise RowMixing(f"the output {item} ({getattr(value, 'shape', value)}) has no batch dimension")
        outputs.append(rows)
    return RowProof(batch, input_rows(gm, batch), tuple(outputs), _sizes(gm, batch))


def _located(value: torch.Tensor, batch: BatchSize) -> Rows | None:
    """The only dimension that is a multiple of the batch."""
    dims = [dim for dim, size in enumerate(value.shape) if batch.within(size)]
    block = batch.factor(value.shape[dims[0]]) if len(dims) == 1 else None
    return None if block is None else Rows(dims[0], block)


def _sizes(gm: GraphModule, batch: BatchSize) -> frozenset[int]:
    placeholders = enumerate(gm.graph.find_nodes(op="placeholder"))
    return frozenset(
        number
        for number, node in placeholders
        if not isinstance(metadata(node), torch.Tensor) and batch.within(metadata(node))
    )


def _outputs(gm: GraphModule) -> tuple[Any, ...]:
    found = gm.graph.output_node().args[0]
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)
