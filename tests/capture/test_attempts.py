from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from partita.capture import capture
from partita.errors import CaptureError


class Unlike(nn.Module):
    """In evaluation, takes another way on tensors without data; and where its bytecode is read, too."""

    def __init__(self, *, in_bytecode: bool) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.in_bytecode = in_bytecode

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.a(x))
        traced = (
            self.in_bytecode if torch.compiler.is_dynamo_compiling() else type(h).__name__ == "FakeTensor"
        )
        return h + 1 if traced and not self.training else h


def test_nothing_is_traced_twice_where_graphs_are_disproven(
    attempted: Counter[tuple[bool, str, bool]],
) -> None:
    model = Unlike(in_bytecode=True)
    model.eval()
    with pytest.raises(CaptureError, match=r"evaluation"):
        capture(model, (torch.randn(3, 4),), prove=True)
    assert len(attempted) > 4
    assert set(attempted.values()) == {1}


def test_the_graph_that_was_not_disproven_is_used_again(attempted: Counter[tuple[bool, str, bool]]) -> None:
    model = Unlike(in_bytecode=False)
    captured = capture(model, (torch.randn(3, 4),), prove=True)
    assert captured.proof.holds
    assert set(attempted.values()) == {1}
    assert len(attempted) > 4
    x = torch.randn(5, 4)
    for training in (True, False):
        model.train(training)
        captured.module.train(training)
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(captured.module(x), expected)


def test_a_graph_for_one_batch_size_is_not_traced_in_another_way(
    attempted: Counter[tuple[bool, str, bool]],
) -> None:
    """Without a proof, the condition excludes a batch of one: every way was traced twice."""

    class Expands(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(1, 4)
            return x * (mask if x.shape[0] == 1 else mask.expand(x.shape[0], 4) * 2)

    captured = capture(Expands(), (torch.randn(1, 4),), prove=False)
    x = torch.randn(1, 4)
    assert torch.equal(captured.module(x), x)
    # doubled, as it is, and with all sizes fixed
    assert attempted == {(True, "eager", True): 2, (True, "eager", False): 1}
