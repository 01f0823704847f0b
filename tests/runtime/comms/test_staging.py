"""Tensors go out and come in as contiguous memory, whatever their own looks like."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from partita.runtime.comms._staging import copied_back, staged_for_receiving, staged_for_sending

CPU = torch.device("cpu")
ODD = {
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "every second": torch.arange(6.0)[::2],
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "leaf": torch.arange(3.0, requires_grad=True),
}


def test_a_contiguous_tensor_is_sent_and_filled_as_it_is() -> None:
    tensor = torch.arange(3.0)
    assert staged_for_sending(tensor, tensor.dtype, CPU) is tensor
    assert staged_for_receiving(tensor, CPU) is tensor
    assert copied_back(tensor, tensor) is None


@pytest.mark.parametrize("tensor", ODD.values(), ids=ODD)
def test_what_is_sent_has_the_values_in_order(tensor: Tensor) -> None:
    staged = staged_for_sending(tensor, tensor.dtype, CPU)
    assert staged.is_contiguous()
    assert not any((staged.is_conj(), staged.is_neg(), staged.requires_grad))
    assert torch.equal(staged, tensor.detach())


@pytest.mark.parametrize("tensor", ODD.values(), ids=ODD)
def test_what_has_come_in_is_copied_to_where_it_belongs(tensor: Tensor) -> None:
    buffer = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    target = torch.empty_strided(buffer.shape, tensor.stride(), dtype=tensor.dtype)
    staged = staged_for_receiving(target, CPU)
    staged.copy_(buffer.detach())
    finish = copied_back(target, staged)
    if finish is not None:
        finish()
    assert torch.equal(target, buffer.detach())


def test_another_dtype_is_converted_on_the_way_out() -> None:
    assert staged_for_sending(torch.ones(2), torch.float64, CPU).dtype is torch.float64
