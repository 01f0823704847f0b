"""Microbatches, under the names of ``torch.distributed.pipelining.microbatch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from partita.runtime import Reduce, TensorChunkSpec, merge, split_args, split_tree
from partita.runtime import Replicate as _Replicate

__all__ = [
    "DEFAULT_CHUNK_DIM",
    "BlockMask",
    "TensorChunkSpec",
    "_CustomReducer",
    "_Replicate",
    "_split_block_mask",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "sum_reducer",
]

DEFAULT_CHUNK_DIM = 0
"""The dimension along which tensors without a spec are cut."""


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Sequence[Any] | None = None,
    kwargs_chunk_spec: Mapping[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Call `runtime.split_args`; return positional and keyword arguments apart.

    Raises:
        MicrobatchError: as `runtime.split_args`; a batch of fewer than ``chunks`` samples, too.

    >>> split_args_kwargs_into_chunks((1,), {"y": 2}, 2)
    ([(1,), (1,)], [{'y': 2}, {'y': 2}])
    """
    parts = split_args(args, kwargs, chunks, args_chunk_spec, kwargs_chunk_spec)
    return [positional for positional, _ in parts], [named for _, named in parts]


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any) -> Any:
    """Call `runtime.merge`: the whole batch's result from the microbatches'.

    Raises:
        MicrobatchError: as `runtime.merge`.
    """
    return merge(chunks, chunk_spec)


def _CustomReducer(init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> Reduce:  # noqa: N802 - torch's
    """Make a `runtime.Reduce` from arguments in torch's order."""
    return Reduce(reduce_fn, init_value)


sum_reducer = Reduce(add, torch.tensor(0.0))
"""Sums the results of the microbatches."""


def _split_block_mask(block_mask: BlockMask, num_chunks: int) -> list[BlockMask]:
    """Cut a mask of FlexAttention into microbatches, whose functions see their own samples only; a mask whose
    batch is 1 is the same for all.

    Raises:
        MicrobatchError: fewer samples than ``num_chunks``.
    """
    if block_mask.kv_num_blocks.shape[0] == 1:
        return [block_mask] * num_chunks
    return split_tree(block_mask, num_chunks)[0]
