from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.capture import attempts, capture
from partita.errors import CaptureError

Trace = tuple[bool, str, bool]
"""Whether in training, the way of tracing, whether with open sizes."""


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Counter[Trace]:
    """How often each attempt was traced."""
    counted: Counter[Trace] = Counter()
    original = attempts.export_module

    def export(model: nn.Module, *args: Any, **options: Any) -> Any:
        counted[model.training, options["way"], options["dynamic_shapes"] is not None] += 1
        return original(model, *args, **options)

    monkeypatch.setattr(attempts, "export_module", export)
    return counted


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


def test_nothing_is_traced_twice_where_graphs_are_disproven(traces: Counter[Trace]) -> None:
    model = Unlike(in_bytecode=True)
    model.eval()
    with pytest.raises(CaptureError, match=r"evaluation"):
        capture(model, (torch.randn(3, 4),), prove=True)
    assert len(traces) > 4
    assert set(traces.values()) == {1}


def test_the_graph_that_was_not_disproven_is_used_again(traces: Counter[Trace]) -> None:
    model = Unlike(in_bytecode=False)
    captured = capture(model, (torch.randn(3, 4),), prove=True)
    assert captured.proof.holds
    assert set(traces.values()) == {1}
    assert len(traces) > 4
    x = torch.randn(5, 4)
    for training in (True, False):
        model.train(training)
        captured.module.train(training)
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(captured.module(x), expected)
