"""Attention on the meta device as a device would compute it, without the matrix of all scores."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["FusedAttention"]

_ATTENTION = frozenset(
    {
        torch.nn.functional.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    }
)
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FUSED_WITH_BIAS = torch.ops.aten._scaled_dot_product_efficient_attention.default
"""The one that takes values of another width than the keys, and whose mask may be learned (as T5's is)."""


class FusedAttention(TorchFunctionMode):
    """In this block, attention over meta tensors is one fused operator.

    On the meta device torch takes attention apart into products and a softmax, which keep scores of (sequence
    length)² for the backward pass. What stands for it here keeps the result and one number a row, as the
    fused kernels of real devices do (Dao et al. 2022, "FlashAttention"). Dropout is left out: those kernels
    draw it again. Values may have another width than the keys (as in multi-head latent attention).

    >>> q = torch.empty(1, 2, 64, 8, device="meta")
    >>> with FusedAttention():
    ...     torch.nn.functional.scaled_dot_product_attention(q, q, q).shape
    torch.Size([1, 2, 64, 8])
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ATTENTION:
            return _attention(func, *args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    fits = query.is_meta and query.dim() == key.dim() == value.dim() == 4
    learned = attn_mask is not None and attn_mask.requires_grad
    one_width = fits and query.size(-1) == key.size(-1) == value.size(-1)
    one_count = fits and query.size(1) == key.size(1) == value.size(1)
    with_bias = learned or not one_width
    if not fits or (with_bias and not one_count):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        result: Tensor = func(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return result
    if with_bias:
        shape = (*query.shape[:-1], key.size(-2))
        bias = None if attn_mask is None else attn_mask.to(query.dtype).expand(shape)
        return cast("Tensor", _FUSED_WITH_BIAS(query, key, value, bias, True, 0.0, is_causal, scale=scale)[0])
    # On meta tensors it takes fewer keys than queries (grouped queries) as it is.
    output: Tensor = _FUSED(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
