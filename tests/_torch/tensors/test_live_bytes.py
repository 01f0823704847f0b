from __future__ import annotations

import pytest
import torch

from partita._torch.tensors.live_bytes import LiveBytes
from partita._torch.tensors.storage import storage_key


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_autograd_keeps_is_alive_until_the_backward_pass(device: str) -> None:
    x = torch.empty(100, device=device, requires_grad=True)
    with LiveBytes() as live:
        y = x.exp().relu().sum()
        assert live.now() == 2 * 400 + 4  # both save their results
        y.backward()
        del y
        assert live.now() == 400  # x.grad


def test_what_was_there_and_views_of_it_do_not_count() -> None:
    weight = torch.ones(8, 8)
    with LiveBytes() as live:
        view = weight.t()[1:]
        assert (live.now(), live.alive()) == (0, {})
        copied = view.clone()
        assert live.alive() == {storage_key(copied): 7 * 8 * 4}
        rows = copied[0]
        assert live.now() == 7 * 8 * 4
        del copied, rows
        assert live.now() == 0
        weight.add_(1.0)
    assert live.most == 7 * 8 * 4


def test_the_most_can_start_anew() -> None:
    with LiveBytes() as live:
        torch.ones(100)
        kept = torch.ones(10)
        assert live.start_anew() == 40
        torch.ones(5)
        assert live.most == 60
    assert kept.numel() == 10


def test_a_sparse_result_has_no_storage_of_its_own_and_does_not_disturb() -> None:
    with LiveBytes() as live:
        sparse = torch.eye(3).to_sparse()
        assert sparse._nnz() == 3
    assert live.most >= 36


def test_what_a_branch_returns_is_alive_and_it_runs() -> None:
    """A model with `torch.cond` could not be planned: torch refused to run it within a mode."""
    x = torch.ones(10)
    branch = torch.ops.higher_order.cond
    with LiveBytes() as live:
        (y,) = branch(torch.tensor(True), lambda x: (x * 2,), lambda x: (x - 1,), (x,))
        assert live.now() == 40
    assert torch.equal(y, x * 2)
