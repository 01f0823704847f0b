"""``DDPOptimizer``: cuts forward graphs of modules that are wrapped in torch's own
``DistributedDataParallel``.

A compiled backward graph is one node to autograd: DDP's hooks fire when all of it is over. Cut the forward
graph, and each piece has a backward graph and a node of its own. `partita.ddp.replicate` needs no such cuts,
and keeps the forward graph whole; this is for training code that stays with DDP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.compile.ddp_graphs import name_cut, show_compiled, show_pieces
from partita._torch.compile.forward_pieces import (
    as_fake,
    compile_forward_piece,
    copy_module,
    inherit_marks,
    must_reach_dynamo,
    run_fake,
    with_strides_of,
    wraps_others,
)
from partita._torch.distributed.ddp_reducer import (
    FIRST_BUCKET_BYTES,
    active_reducer,
    replace_optimizer,
    replaced_optimizer,
)
from partita._torch.tensors.storage import storage_key
from partita.ddp.forward_cut.buckets import Bucket, assign_buckets
from partita.ddp.forward_cut.numbers import repeat_numbers
from partita.ddp.forward_cut.writes import joined_over_writes
from partita.errors import ArgumentError, SplitError
from partita.graph.attributes import lookup
from partita.graph.effects import metadata
from partita.graph.structure import structural_hash
from partita.splitter import Piece, Split, split

__all__ = ["DDPOptimizer", "use_partita_ddp_optimizer"]

_LOG = logging.getLogger("partita.ddp")


class DDPOptimizer:
    """Cuts a graph of Dynamo's where DDP's buckets begin, and compiles the pieces. Pieces that are equal are
    compiled once.

    Where a DDP module is running, its own caps and buckets count.

    Args:
        bucket_bytes_cap: a bucket is closed as soon as it holds so many bytes.
        backend_compile_fn: the backend, called with each piece and example inputs.
        first_bucket_cap: the same for the first bucket; DDP's default, or ``bucket_bytes_cap`` where that is
            less.

    Attributes:
        buckets: of the last graph, in forward order.
        compiled: how many pieces of it went to the backend.

    Raises:
        ArgumentError: a cap below 1, or a backend that can't be called.
    """

    def __init__(
        self,
        bucket_bytes_cap: int,
        backend_compile_fn: Callable[..., Any],
        first_bucket_cap: int | None = None,
    ) -> None:
        for what, cap in (("bucket_bytes_cap", bucket_bytes_cap), ("first_bucket_cap", first_bucket_cap)):
            if cap is not None and cap < 1:
                raise ArgumentError(f"{what} is {cap}: give at least 1 byte")
        if not callable(backend_compile_fn):
            raise ArgumentError(
                f"backend_compile_fn is {backend_compile_fn!r}: give a function of a graph and its example "
                "inputs; torch._dynamo.lookup_backend('aot_eager') is the one of that name"
            )
        self.bucket_bytes_cap = bucket_bytes_cap
        self.first_bucket_cap = first_bucket_cap or min(FIRST_BUCKET_BYTES, bucket_bytes_cap)
        self.backend_compile_fn = backend_compile_fn
        self.buckets: list[Bucket] = []
        self.compiled = 0

    def compile_fn(
        self, gm: GraphModule, example_inputs: Sequence[Any], **compiler_configs: Any
    ) -> Callable[..., Any]:
        """The backend that Dynamo calls.

        Returns:
            A function of the same inputs.
        """
        caps = (self.first_bucket_cap, self.bucket_bytes_cap)
        self.buckets = assign_buckets(gm, example_inputs, caps, active_reducer())
        self.compiled = 1
        _LOG.info("%s", _table(self.buckets))
        cut = self._cut(gm) if len(self.buckets) > 1 and _has_backward(gm) else None
        if cut is None or len(cut.pieces) < 2:
            return self.backend_compile_fn(gm, example_inputs, **compiler_configs)
        show_pieces(gm, cut.module, {piece.name: piece.module for piece in cut.pieces})
        pieces = _Pieces(gm, cut, self.backend_compile_fn, compiler_configs)
        for piece in cut.pieces:
            name_cut(piece.module, _reason(piece, self.buckets))
        module = pieces.compile(example_inputs)
        show_compiled(module)
        self.compiled = pieces.compiled
        _LOG.info("%d pieces, %d of them compiled", len(cut.pieces), pieces.compiled)
        return module

    def _cut(self, gm: GraphModule) -> Split | None:
        number_of = {node: number for number, bucket in enumerate(self.buckets) for node in bucket.nodes}
        repeat_numbers(gm, number_of)
        joined = joined_over_writes(gm, _with_parameters(number_of))
        assignment = {node: number for node, number in joined.items() if node.op != "get_attr"}
        try:
            return split(gm, assignment, on_conflict="repair", shared="root", tuple_return=True)
        except SplitError as error:
            _LOG.warning("the graph is compiled as a whole, for it can't be cut at the buckets: %s", error)
            return None


class _Pieces:
    """The pieces of one graph on their way through the backend."""

    def __init__(
        self, gm: GraphModule, cut: Split, backend: Callable[..., Any], options: dict[str, Any]
    ) -> None:
        self._gm = gm
        self._cut = cut
        self._backend = backend
        self._options = options
        self._runs: dict[tuple[Any, ...], tuple[Callable[..., Any], Any]] = {}
        self.compiled = 0

    def compile(self, example_inputs: Sequence[Any]) -> GraphModule:
        """The stitched module, with compiled pieces."""
        placeholders = self._gm.graph.find_nodes(op="placeholder")
        # Tensors become fake in the mode that Dynamo has made for its backends: it traced in another one.
        examples = [
            example if isinstance(example, torch.Tensor) else node.meta.get("example_value", example)
            for node, example in zip(placeholders, example_inputs, strict=True)
        ]
        names = [node.name for node in placeholders]
        values: dict[str, Any] = dict(zip(names, as_fake(examples), strict=True))
        for node in self._gm.graph.find_nodes(op="get_attr"):
            values[node.name] = lookup(self._gm, node)
        for piece in self._cut.pieces:
            run, results = self._one(piece.module, as_fake([values[name] for name in piece.inputs]))
            values.update(zip(piece.outputs, results, strict=True))
            setattr(self._cut.module, piece.name, _Compiled(run))
        return self._cut.module

    def _one(self, gm: GraphModule, examples: list[Any]) -> tuple[Callable[..., Any], Any]:
        for node, example in zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True):
            node.meta["example_value"] = example
        key = _key(gm, examples)
        if key is not None and key in self._runs:
            run, results = self._runs[key]
            return run, with_strides_of(run_fake(gm, examples), results)
        inherit_marks(self._gm, gm)
        uncompiled = copy_module(gm)
        try:
            run, results = compile_forward_piece(gm, examples, self._backend, self._options)
            self.compiled += 1
        except Exception as error:
            if must_reach_dynamo(error):
                raise
            _LOG.warning("a piece runs as it is, for the backend could not compile it: %r", error)
            run, results = uncompiled, run_fake(uncompiled, examples)
        if key is not None:
            self._runs[key] = (run, results)
        return run, results


class _Compiled(nn.Module):
    """A compiled piece, as a module of the stitched graph."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *args: Any) -> Any:
        return self._run(*args)


@contextmanager
def use_partita_ddp_optimizer() -> Iterator[None]:
    """``torch.compile`` takes `DDPOptimizer` of partita, not its own, for what it compiles in this block.

    It compiles at the first call, so keep the block open around training, or call that first step in it.
    """
    before = replaced_optimizer()
    replace_optimizer(DDPOptimizer)
    try:
        yield
    finally:
        replace_optimizer(before)


def _key(gm: GraphModule, examples: Sequence[Any]) -> tuple[Any, ...] | None:
    """Equal for pieces that one compiled function serves; None for a piece that is compiled for itself.

    A compiler takes note of inputs that share memory, of sizes by their symbols, and of what a tensor wraps.
    """
    tensors = [example for example in examples if isinstance(example, torch.Tensor)]
    if wraps_others(tensors) or len({storage_key(tensor) for tensor in tensors}) < len(tensors):
        return None
    facts = [
        (type(e), str(tuple(e.shape)), str(e.stride()), e.dtype, e.device, e.requires_grad, e.is_leaf)
        if isinstance(e, torch.Tensor)
        else (type(e), str(e))
        for e in examples
    ]
    return (structural_hash(gm.graph, gm), *facts)


def _has_backward(gm: GraphModule) -> bool:
    """Whether a gradient can flow through the graph; nothing is reduced where it can't."""
    values = [
        metadata(node) for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")
    ]
    leaves = [leaf for value in values for leaf in (value if isinstance(value, (list, tuple)) else (value,))]
    return any(leaf is None or getattr(leaf, "requires_grad", False) for leaf in leaves)


def _reason(piece: Piece, buckets: Sequence[Bucket]) -> str:
    """Why there is this piece, for those who look at graphs."""
    inside = set(piece.node_names)
    mine = [bucket for bucket in buckets if any(node.name in inside for node in bucket.nodes)]
    names = ", ".join(name for bucket in mine for name in bucket.params) or "none"
    return (
        f"partita's DDPOptimizer cut out {piece.name}, whose backward pass completes DDP's bucket with these "
        f"parameters: {names} (torch._dynamo.config.optimize_ddp = False compiles the whole)"
    )


def _with_parameters(number_of: dict[Node, int]) -> dict[Node, int]:
    """The pieces of all nodes; one that reads nothing but inputs of the graph is where it is used first."""
    moved = dict(number_of)
    for node, number in number_of.items():
        users = [number_of[user] for user in node.users if user in number_of]
        if len(users) == len(node.users) and all(o.op == "placeholder" for o in node.all_input_nodes):
            moved[node] = min(users, default=number)
    return moved


def _table(buckets: Sequence[Bucket]) -> str:
    """One line a bucket, in the order in which they are reduced."""
    lines = [f"{'bucket':>6}  {'bytes':>12}  parameters"]
    for number, bucket in enumerate(reversed(buckets)):
        lines.append(f"{number:>6}  {bucket.size:>12,}  {', '.join(bucket.params)}")
        if bucket.opcount_increased_to_capture_external_output:
            more = bucket.opcount_increased_to_capture_external_output
            lines.append(f"{'':>6}  {'':>12}  {more} nodes longer, until one of them was used outside")
    return "\n".join(lines)
