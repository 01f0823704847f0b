"""Copies that share neither memory nor history."""

from __future__ import annotations

import torch

from partita._torch.tensors.detached_copy import detached_copy, detached_leaf_copy


def test_a_copy_shares_neither_memory_nor_history() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    copies = detached_copy(tensor), detached_leaf_copy(tensor)
    with torch.no_grad():
        tensor.zero_()
    assert [copy.tolist() for copy in copies] == [[2, 2], [2, 2]]
    assert [(copy.requires_grad, copy.is_leaf) for copy in copies] == [(False, True), (True, True)]


def test_what_is_no_tensor_and_what_has_no_gradient_stays_so() -> None:
    assert detached_copy("a") == detached_leaf_copy("a") == "a"
    assert not detached_leaf_copy(torch.ones(2, dtype=torch.int64)).requires_grad
