"""Masks of FlexAttention in microbatches: a `BlockMask` holds tensors, which can be cut, and a function of
the sample's number in the batch, which has to be told where its microbatch begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

__all__ = ["shift_masks"]

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def shift_masks(whole: Any, part: Any, start: int) -> None:
    """Let the masks in a microbatch be about its own samples.

    Args:
        whole: nested containers, of the whole batch.
        part: the same of a microbatch, its tensors cut; each mask in it that was cut is changed.
        start: the number of its first sample in the batch.
    """
    for of_batch, mask in zip(_masks(whole), _masks(part), strict=True):
        if mask is not of_batch and mask.kv_num_blocks.shape[0] != of_batch.kv_num_blocks.shape[0]:
            mask.mask_mod = _shifted(of_batch.mask_mod, start)


def _masks(tree: Any) -> list[BlockMask]:
    leaves = pytree.tree_leaves(tree, is_leaf=lambda value: isinstance(value, BlockMask))
    return [leaf for leaf in leaves if isinstance(leaf, BlockMask)]


def _shifted(mask_mod: MaskFunction, start: int) -> MaskFunction:
    def shifted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b + start, h, q_idx, kv_idx)

    return shifted if start else mask_mod
