"""Masks of FlexAttention in microbatches: a `BlockMask` holds tensors, which can be cut, and a function of a
sample's position in the batch, to which the start of its microbatch has to be added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

__all__ = ["shift_masks"]

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def shift_masks(whole: Any, parts: Sequence[Any]) -> None:
    """Shift the masks of microbatches, in place, to the position of their samples in the batch.

    Args:
        whole: nested containers with the masks of the whole batch.
        parts: the same for each microbatch, in order, with tensors that are cut.
    """
    of_whole = _masks(whole)
    if not of_whole:
        return
    for of_batch, *masks in zip(of_whole, *map(_masks, parts), strict=True):
        start, size = 0, of_batch.kv_num_blocks.shape[0]
        for mask in masks:
            rows = mask.kv_num_blocks.shape[0]
            if mask is not of_batch and rows != size:
                mask.mask_mod = _shifted(of_batch.mask_mod, start)
            start += rows


def _masks(tree: Any) -> list[BlockMask]:
    leaves = pytree.tree_leaves(tree, is_leaf=lambda value: isinstance(value, BlockMask))
    return [leaf for leaf in leaves if isinstance(leaf, BlockMask)]


def _shifted(mask_mod: MaskFunction, start: int) -> MaskFunction:
    def shifted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b + start, h, q_idx, kv_idx)

    return shifted if start else mask_mod
