"""What modules keep in tensors of their own is seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.pipelining.blocks.tensor_attributes import TensorAttributes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.state = None  # type: ignore[assignment]
        self.calls = 0
        self.register_buffer("table", torch.zeros(2))


def _after(change: str, value: Tensor | int | None = None) -> str | None:
    model = Model()
    attributes = TensorAttributes(model)
    before = attributes.look()
    match change:
        case "attribute":
            model.inner.state = value  # type: ignore[assignment]
        case "write":
            model.table.add_(1)
        case "replace":
            model.register_buffer("table", torch.ones(2))
        case "count":
            model.calls += 1
    return attributes.changed_since(before)


def test_a_tensor_in_an_attribute_is_named() -> None:
    assert _after("attribute", torch.ones(1)) == "inner.state"


def test_a_write_to_a_buffer_is_named() -> None:
    assert _after("write") == "table"


def test_a_replaced_buffer_and_numbers_are_left_alone() -> None:
    assert _after("replace") is None
    assert _after("count") is None


def test_nothing_is_nothing() -> None:
    assert _after("attribute", None) is None
