from __future__ import annotations

import pytest
import torch

from partita._torch.tensors.norms import each_norm


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norms_come_in_order_whatever_the_dtypes(norm_type: float, foreach: bool | None) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(5), torch.randn(3, 2, dtype=torch.double), torch.randn(7), torch.zeros(())]
    norms = each_norm(tensors, norm_type, foreach)
    for norm, tensor in zip(norms, tensors, strict=True):
        assert norm.dtype == tensor.dtype
        assert torch.equal(norm, torch.linalg.vector_norm(tensor, norm_type))


def test_nothing_has_no_norms() -> None:
    assert each_norm([], 2.0) == []


def test_put_together_they_are_torchs_own_total() -> None:
    tensors = [torch.randn(50) for _ in range(9)]
    total = torch.linalg.vector_norm(torch.stack(each_norm(tensors, 2.0)), 2.0)
    assert torch.equal(total, torch.nn.utils.get_total_norm(tensors))


def test_kernels_that_a_device_does_not_have_are_refused() -> None:
    with pytest.raises(RuntimeError, match="meta has no such kernels: pass foreach=None"):
        each_norm([torch.zeros(2, device="meta")], 2.0, foreach=True)
