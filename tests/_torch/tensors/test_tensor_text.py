"""Dtypes and shapes as text."""

from __future__ import annotations

import torch

from partita._torch.tensors.tensor_text import dtype_and_shape, short_name, tensor_text


def test_the_name_of_a_dtype_or_layout_has_no_prefix() -> None:
    assert short_name(torch.bfloat16) == "bfloat16"
    assert short_name(torch.strided) == "strided"


def test_a_tensor_is_its_dtype_and_shape() -> None:
    assert tensor_text(torch.zeros(2, 3)) == dtype_and_shape(torch.float32, (2, 3)) == "float32[2, 3]"
    assert tensor_text(torch.tensor(True)) == "bool[]"
