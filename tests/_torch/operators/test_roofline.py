from __future__ import annotations

import torch

from partita._torch.operators.roofline import roofline_seconds


def test_a_product_takes_its_arithmetic_or_its_memory_traffic_whichever_is_longer() -> None:
    x = torch.empty(100, 100, device="meta")
    assert roofline_seconds(lambda: x @ x, 1e6, 1e12)[1] == 2 * 100**3 / 1e6
    assert roofline_seconds(lambda: x @ x, 1e12, 1e6)[1] == 3 * 4 * 100**2 / 1e6


def test_views_cost_nothing_and_backward_passes_count() -> None:
    x = torch.empty(10, 10, device="meta", requires_grad=True)
    assert roofline_seconds(lambda: x.t().reshape(5, 20)[1:], 1e6, 1e6)[1] > 0  # reshape copies
    assert roofline_seconds(lambda: x.t()[1:], 1e6, 1e6)[1] == 0
    y = x @ x
    result, seconds = roofline_seconds(lambda: torch.autograd.grad(y.sum(), x), 1e3, 1e12)
    assert result[0].shape == x.shape
    assert seconds >= 2 * 2 * 10**3 / 1e3
