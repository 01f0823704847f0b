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
from partita.cudagraphs.facts.source_line import source_line
from partita.cudagraphs.padding.row_call import RowMixing, Rows, rows_by_shape
from partita.cudagraphs.padding.row_rules import rows_after
from partita.graph.effects import Effects, metadata

__all__ = ["RowProof", "follow_rows", "rows_by_shapes"]


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


def follow_rows(gm: GraphModule, effects: Effects, batch: BatchSize) -> RowProof:
    """Follow the rows of the batch through a flat functional graph with example values.

    Args:
        effects: of the graph.

    Raises:
        RowMixing: the rows meet.
    """
    inputs = _input_rows(gm, batch)
    rows: dict[Node, Any] = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    random = {effects.nodes[position] for position in effects.random}
    for node in effects.nodes:
        if node.op in ("placeholder", "output"):
            continue
        try:
            attention = "scaled_dot_product" in str(node.target)  # draws only where its rule refuses it
            if node in random and not attention and batch.within(metadata(node)):
                raise RowMixing("it draws random numbers, and more rows draw more of them")
            rows[node] = None if node.op == "get_attr" else rows_after(node, rows.__getitem__, batch)
        except RowMixing as why:
            source = source_line(node)
            raise RowMixing(
                f"{node.name} ({node.target}){f' at {source}' if source else ''}: {why}"
            ) from None
    outputs = tuple(rows[item] if isinstance(item, Node) else None for item in _outputs(gm))
    return RowProof(batch, inputs, outputs, _size_inputs(gm, batch))


def rows_by_shapes(gm: GraphModule, batch: BatchSize) -> RowProof:
    """The rows of inputs and outputs as their shapes have them, without a proof.

    Raises:
        RowMixing: the batch is not one dimension of each that depends on it.
    """
    outputs: list[Rows | None] = []
    for item in _outputs(gm):
        value = metadata(item) if isinstance(item, Node) else item
        rows = rows_by_shape(value, batch) if isinstance(value, torch.Tensor) else None
        if rows is None and batch.within(value):
            raise RowMixing(f"the output {item} ({getattr(value, 'shape', value)}) has no batch dimension")
        outputs.append(rows)
    return RowProof(batch, _input_rows(gm, batch), tuple(outputs), _size_inputs(gm, batch))


def _input_rows(gm: GraphModule, batch: BatchSize) -> tuple[Rows | None, ...]:
    """Where the rows are in each input.

    Raises:
        RowMixing: an input is laid out such that padding would take more than rows at its end.
    """
    inputs: list[Rows | None] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = metadata(node)
        if not isinstance(value, torch.Tensor) or not batch.within(value.shape):
            if batch.within(value) and batch.factor(value) != 1:
                raise RowMixing(f"the input {node.name!r} is the number {value}, made of the batch size")
            inputs.append(None)
            continue
        rows = rows_by_shape(value, batch)
        if rows is None or rows.block != 1 or batch.within(value.stride()):
            raise RowMixing(
                f"the input {node.name!r} of shape {tuple(value.shape)} and strides {value.stride()} has the "
                f"batch not as its outermost dimension in memory: pass it contiguous, batch first"
            )
        inputs.append(rows)
    return tuple(inputs)


def _size_inputs(gm: GraphModule, batch: BatchSize) -> frozenset[int]:
    """Indices of the inputs that are the batch size, as a number."""
    values = [metadata(node) for node in gm.graph.find_nodes(op="placeholder")]
    return frozenset(
        number
        for number, value in enumerate(values)
        if not isinstance(value, torch.Tensor) and batch.within(value)
    )


def _outputs(gm: GraphModule) -> tuple[Any, ...]:
    outputs = gm.graph.output_node().args[0]
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
