from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from partita._torch.operators.fused_attention import FusedAttention
from partita._torch.tensors.live_bytes import LiveBytes

ATTENTION = functional.scaled_dot_product_attention


def meta(*sizes: int) -> torch.Tensor:
    return torch.empty(*sizes, device="meta", requires_grad=True)


def test_the_scores_are_not_kept() -> None:
    q = meta(1, 2, 512, 8)
    with FusedAttention(), LiveBytes() as live:
        result = ATTENTION(q, q, q)
        assert live.most < 512 * 512 * 4
        assert live.now() == q.nbytes + 2 * 512 * 4  # the result, and one number a row
        result.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_the_operator_of_a_captured_graph_is_taken_too() -> None:
    q = meta(1, 2, 512, 8)
    with FusedAttention(), LiveBytes() as live:
        result = torch.ops.aten.scaled_dot_product_attention.default(q, q, q, None, 0.1, True)
        assert live.most < 512 * 512 * 4
    assert result.requires_grad


def test_keys_that_serve_several_queries_are_not_repeated() -> None:
    q, k, v = meta(1, 8, 16, 4), meta(1, 2, 16, 4), meta(1, 2, 16, 4)
    with FusedAttention(), LiveBytes() as live:
        result = ATTENTION(q, k, v, enable_gqa=True)
        assert live.now() == q.nbytes + 8 * 16 * 4
    result.sum().backward()
    assert k.grad is not None
    assert k.grad.shape == k.shape


@pytest.mark.parametrize("masked", [False, True])
def test_values_of_another_width_keep_no_scores_either(masked: bool) -> None:
    q, k, v = meta(1, 2, 64, 24), meta(1, 2, 64, 24), meta(1, 2, 64, 16)
    mask = torch.empty(1, 1, 64, 64, device="meta", dtype=torch.bool) if masked else None
    saved: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with FusedAttention(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = ATTENTION(q, k, v, mask, 0.0, not masked)
    assert result.shape == (1, 2, 64, 16)
    assert saved.count(torch.Size((1, 2, 64, 64))) == masked
    result.sum().backward()
    assert [tensor.grad.shape for tensor in (q, k, v)] == [q.shape, k.shape, v.shape]


def test_what_has_memory_or_another_shape_is_computed_by_torch() -> None:
    q = torch.randn(1, 2, 8, 4)
    with FusedAttention():
        assert torch.equal(ATTENTION(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))
        assert ATTENTION(meta(1, 2, 8, 4), meta(1, 2, 6, 4), meta(1, 2, 6, 3)).shape == (1, 2, 8, 3)
        assert ATTENTION(meta(8, 4), meta(6, 4), meta(6, 4)).shape == (8, 4)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_mask_that_is_learned_gets_its_gradient_and_no_scores_are_kept(heads: int) -> None:
    """It was taken apart, in float32: attention of T5 took five times as long as on a device."""
    q, bias = meta(1, 2, 512, 8), meta(1, heads, 512, 512)
    with FusedAttention(), LiveBytes() as live:
        result = ATTENTION(q, q, q, attn_mask=bias)
        assert live.now() == q.nbytes + 2 * 512 * 4 + 16  # where dropout would start, too
        result.sum().backward()
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape


def test_a_learned_mask_with_keys_that_serve_several_queries_is_left_to_torch() -> None:
    q, k, bias = meta(1, 8, 16, 4), meta(1, 2, 16, 4), meta(1, 1, 16, 16)
    with FusedAttention():
        ATTENTION(q, k, k, attn_mask=bias, enable_gqa=True).sum().backward()
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape
