"""Padding the batch to a few sizes, so that a few recordings serve every size.

::

    batch of 5 ── rows copied ──> buffer of 8: rows 0 ... 4, and row 4 three times more
                                     │  replay of the recording for 8
    results of 5 rows <── cut ───  results of 8 rows

What comes back is, bit for bit, what the model gives for the padded batch, cut. A kernel may round otherwise
for another batch size (a matrix product chooses its algorithm by the shape), so against the model on the
unpadded batch results may differ in the last bits, as they do between any two batch sizes.

The padding is a repetition of the last row: its values are such as the model takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.export.batch_size import find_batch
from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.facts.written_inputs import written_inputs
from partita.cudagraphs.padding.row_call import RowMixing
from partita.cudagraphs.padding.row_proof import RowProof, follow_rows, rows_by_shapes
from partita.graph.effects import analyse, metadata

__all__ = ["PaddedGraph", "plan_padding"]

_LOG = logging.getLogger("partita.cudagraphs")


def plan_padding(
    gm: GraphModule,
    kind: str,
    run: Callable[..., Any],
    buckets: Sequence[int],
    assume: bool,
    memory: StableMemory,
) -> PaddedGraph | str:
    """Return a runner that pads; or why the graph can't be padded.

    Args:
        gm: a flat graph with example values.
        kind: only inference graphs are padded: the gradient of a weight sums over the batch.
        run: runs the graph, for any batch size.
        assume: whether the user says that rows keep apart (``rows_apart``).
    """
    if kind != "inference":
        return "it is part of a training step, and the gradients of weights are sums over the batch"
    batch = find_batch(gm)
    if isinstance(batch, str):
        return batch
    effects = analyse(gm)
    written = frozenset(written_inputs(effects))
    try:
        proof = follow_rows(gm, effects, batch)
        return PaddedGraph(run, gm, proof, buckets, memory, written)
    except RowMixing as why:
        if not assume:
            return f"{why}. If rows keep apart all the same, pass rows_apart=True"
    if effects.random or written:
        return "rows_apart=True can't be checked where random numbers are drawn or inputs are written"
    try:
        return PaddedGraph(run, gm, rows_by_shapes(gm, batch), buckets, memory, written, check_with=gm)
    except RowMixing as why:
        return str(why)


class PaddedGraph:
    """Runs a graph on batches padded to the next bucket. Made by the backend from its option ``buckets``.

    Args:
        run: runs the graph, for any batch size.
        gm: the graph, for the shapes of its outputs.
        proof: where the rows are.
        buckets: sizes in rising order. A larger batch, and an empty one, is run as it is.
        memory: where the padded inputs' addresses are declared as fixed.
        written: indices of the inputs that the graph writes.
        check_with: where the proof is the user's word: runs the unpadded batch, to compare with, at the first
            call of each bucket. At a difference it warns, and never pads again.

    Attributes:
        gave_up: why it pads no more, or an empty string.
        padded_calls: how many calls were padded.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        gm: GraphModule,
        proof: RowProof,
        buckets: Sequence[int],
        memory: StableMemory,
        written: frozenset[int],
        check_with: Callable[..., Any] | None = None,
    ) -> None:
        self.buckets = tuple(buckets)
        self.gave_up = ""
        self.padded_calls = 0
        self._run = run
        self._proof = proof
        self._memory = memory
        self._written = written
        self._check_with = check_with
        self._checked: set[int] = set()
        self._allowed: dict[int, bool] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._examples = [metadata(node) for node in gm.graph.find_nodes(op="placeholder")]
        outputs = gm.graph.output_node().args[0]
        assert isinstance(outputs, (tuple, list))
        self._outputs: list[Any] = [metadata(item) if isinstance(item, Node) else item for item in outputs]

    def __call__(self, *args: Any) -> Any:
        """Run the graph on these inputs."""
        # 1. Batches that no bucket serves run as they are.
        size = self._size(args)
        bucket = next((bucket for bucket in self.buckets if bucket >= size), None)
        if self.gave_up or bucket is None or not size or not self._allows(bucket):
            return self._run(*args)

        # 2. Run the padded batch, and copy the rows that it has written back.
        padded = [self._padded(number, value, size, bucket) for number, value in enumerate(args)]
        results = self._run(*padded)
        for number in self._written:
            rows = self._proof.inputs[number]
            if rows is not None:
                args[number].copy_(padded[number].narrow(rows.dim, 0, size))

        # 3. Cut the results, and compare them where only the user's word says that rows keep apart.
        symbols = self._symbols(args)
        cut = tuple(self._cut(number, value, size, symbols) for number, value in enumerate(results))
        self.padded_calls += 1
        if self._check_with is None or bucket in self._checked:
            return cut
        return self._check(cut, args, bucket)

    def _size(self, args: Sequence[Any]) -> int:
        for rows, value in zip(self._proof.inputs, args, strict=True):
            if rows is not None:
                return int(value.shape[rows.dim])
        raise AssertionError("a batch has an input")

    def _allows(self, bucket: int) -> bool:
        """Whether the graph is right for a batch of the bucket's size."""
        if bucket not in self._allowed:
            self._allowed[bucket] = self._proof.batch.allows(bucket)
            if not self._allowed[bucket]:
                _LOG.warning(
                    "batches are not padded to %s: the graph was compiled for other sizes only", bucket
                )
        return self._allowed[bucket]

    def _padded(self, number: int, value: Any, size: int, bucket: int) -> Any:
        rows = self._proof.inputs[number]
        if number in self._proof.sizes:
            return bucket
        if rows is None:
            return value
        buffer = self._buffer(number, value, rows.dim).narrow(rows.dim, 0, bucket)
        buffer.narrow(rows.dim, 0, size).copy_(value)
        if bucket > size:
            buffer.narrow(rows.dim, size, bucket - size).copy_(value.narrow(rows.dim, size - 1, 1))
        return buffer

    def _buffer(self, number: int, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Room for the largest bucket along ``dim``, at one address for all of them."""
        shape = torch.Size([*value.shape[:dim], self.buckets[-1], *value.shape[dim + 1 :]])
        kind = (shape, value.stride(), value.dtype, value.device)
        buffer = self._buffers.get(number)
        if buffer is None or (buffer.shape, buffer.stride(), buffer.dtype, buffer.device) != kind:
            buffer = torch.empty_strided(shape, value.stride(), dtype=value.dtype, device=value.device)
            self._buffers[number] = buffer
            self._memory.declare((id(self), number), (buffer.untyped_storage().data_ptr(),))
        return buffer

    def _symbols(self, args: Sequence[Any]) -> dict[Any, int]:
        """The values of the other symbols, as they stand in the inputs."""
        symbols: dict[Any, int] = {}
        for example, value in zip(self._examples, args, strict=True):
            pairs = [(example, value)]
            if isinstance(example, torch.Tensor):
                pairs = list(zip(example.shape, value.shape, strict=True))
            symbols |= {size.node.expr: int(real) for size, real in pairs if isinstance(size, torch.SymInt)}
        symbols.pop(self._proof.batch.symbol, None)
        return symbols

    def _cut(self, number: int, value: Any, size: int, symbols: dict[Any, int]) -> Any:
        """The rows of the real batch, in memory of their own."""
        rows, example = self._proof.outputs[number], self._outputs[number]
        batch = self._proof.batch
        if not isinstance(value, torch.Tensor):
            return batch.at(example, size, symbols) if batch.within(example) else value
        if rows is None:
            return value
        part = value.narrow(rows.dim, 0, batch.at(example.shape[rows.dim], size, symbols))
        strides = tuple(batch.at(stride, size, symbols) for stride in example.stride())
        addresses = {buffer.untyped_storage().data_ptr() for buffer in self._buffers.values()}
        if part.stride() == strides and value.untyped_storage().data_ptr() not in addresses:
            return part
        result = torch.empty_strided(part.shape, strides, dtype=part.dtype, device=part.device)
        return result.copy_(part)

    def _check(self, cut: tuple[Any, ...], args: Sequence[Any], bucket: int) -> Any:
        assert self._check_with is not None
        expected = self._check_with(*args)
        try:
            torch.testing.assert_close(cut, tuple(expected), equal_nan=True)
        except AssertionError as error:
            self.gave_up = (
                f"rows_apart=True does not hold: padded to {bucket}, results differ from those of the batch "
                f"as it is ({str(error).splitlines()[0]}). Leave the option out"
            )
            _LOG.warning("the batch is not padded from now on: %s", self.gave_up)
            return expected
        self._checked.add(bucket)
        return cut
