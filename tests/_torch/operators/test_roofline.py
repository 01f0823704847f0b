from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from partita._torch.operators.fused_attention import FusedAttention
from partita._torch.operators.roofline import (
    ATTENTION_EFFICIENCY,
    PRODUCT_EFFICIENCY,
    FixedSpeeds,
    roofline_seconds,
)


def test_a_product_takes_its_arithmetic_or_its_memory_traffic_whichever_is_longer() -> None:
    x = torch.empty(100, 100, device="meta")
    slow, narrow = FixedSpeeds(1e6, 1e12), FixedSpeeds(1e12, 1e6)
    assert roofline_seconds(lambda: x @ x, slow)[1] == pytest.approx(2 * 100**3 / 1e6 / PRODUCT_EFFICIENCY)
    assert roofline_seconds(lambda: x @ x, narrow)[1] == 3 * 4 * 100**2 / 1e6


def test_views_cost_nothing_and_backward_passes_count() -> None:
    x = torch.empty(10, 10, device="meta", requires_grad=True)
    speeds = FixedSpeeds(1e6, 1e6)
    assert roofline_seconds(lambda: x.t().reshape(5, 20)[1:], speeds)[1] > 0  # reshape copies
    assert roofline_seconds(lambda: x.t()[1:].detach(), speeds)[1] == 0
    y = x @ x
    assert roofline_seconds(lambda: torch.ops.aten._unsafe_view(y, (100,)), speeds)[1] == 0
    result, seconds = roofline_seconds(lambda: torch.autograd.grad(y.sum(), x), FixedSpeeds(1e3, 1e12))
    assert result[0].shape == x.shape
    assert seconds >= 2 * 2 * 10**3 / 1e3


def test_the_arithmetic_is_that_of_the_dtype() -> None:
    class Speeds:
        bytes_per_s = 1e30

        def flops(self, dtype: str) -> float:
            return {"float32": 1e6, "bfloat16": 1e7}[dtype]

    x = torch.empty(100, 100, device="meta")
    full, half = (roofline_seconds(lambda y=y: y @ y, Speeds())[1] for y in (x, x.bfloat16()))  # type: ignore[misc]
    assert full == pytest.approx(10 * half)


def test_a_look_up_reads_its_rows_and_memory_that_is_not_written_takes_no_time() -> None:
    table, rows = torch.empty(10_000, 8, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    speeds = FixedSpeeds(1e12, 1.0)
    assert roofline_seconds(lambda: functional.embedding(rows, table), speeds)[1] == 2 * 4 * 8 * 4
    assert roofline_seconds(lambda: torch.empty_like(table), speeds)[1] == 0
    assert roofline_seconds(lambda: table.add_(1.0), speeds)[1] == 2 * 10_000 * 8 * 4
    wide = torch.empty(1, 8, device="meta").expand(1000, 8)
    assert roofline_seconds(lambda: wide.sum(), speeds)[1] == 8 * 4 + 4


def test_attention_has_its_own_efficiency_and_half_of_the_work_where_it_is_causal() -> None:
    q = torch.empty(2, 4, 32, 8, device="meta", requires_grad=True)
    speeds = FixedSpeeds(1e6, 1e12)
    forward = 2 * 2 * q.numel() * 32 / 1e6 / ATTENTION_EFFICIENCY
    with FusedAttention():
        result, whole = roofline_seconds(lambda: functional.scaled_dot_product_attention(q, q, q), speeds)
        _, causal = roofline_seconds(
            lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True), speeds
        )
    assert (whole, causal) == (pytest.approx(forward), pytest.approx(forward / 2))
    assert roofline_seconds(lambda: result.sum().backward(), speeds)[1] == pytest.approx(2.5 * forward)


def test_values_of_another_width_than_the_keys_count_with_theirs() -> None:
    q, v = (torch.empty(2, 4, 32, width, device="meta", requires_grad=True) for width in (12, 8))
    speeds = FixedSpeeds(1e6, 1e12)
    of_keys, of_values = (2 * tensor.numel() * 32 / 1e6 / ATTENTION_EFFICIENCY for tensor in (q, v))
    with FusedAttention():
        result, forward = roofline_seconds(lambda: functional.scaled_dot_product_attention(q, q, v), speeds)
    assert forward == pytest.approx(of_keys + of_values)
    _, backward = roofline_seconds(lambda: result.sum().backward(), speeds)
    assert backward == pytest.approx(3 * of_keys + 2 * of_values)


def test_products_of_experts_count_each_token_once() -> None:
    tokens = torch.empty(64, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.empty(8, 16, 32, device="meta", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.empty(8, device="meta", dtype=torch.int32)
    speeds = FixedSpeeds(1e6, 1e12)
    result, forward = roofline_seconds(lambda: functional.grouped_mm(tokens, weights, offs=ends), speeds)
    assert forward == pytest.approx(2 * 64 * 16 * 32 / 1e6 / PRODUCT_EFFICIENCY)
    _, backward = roofline_seconds(lambda: result.backward(torch.empty_like(result)), speeds)
    assert backward == pytest.approx(2 * forward, rel=0.01)


def test_twice_the_work_takes_twice_as_long() -> None:
    x = torch.empty(64, 64, device="meta")
    speeds = FixedSpeeds(1e9, 1e9)
    times = [roofline_seconds(lambda rows=rows: x.repeat(rows, 1) @ x, speeds)[1] for rows in (32, 64, 128)]  # type: ignore[misc]
    assert all(2 * one == pytest.approx(two, rel=0.05) for one, two in pairwise(times))
