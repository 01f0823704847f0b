"""What an exported graph trains besides its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita._torch.export.export import export_module


class Weighted(nn.Module):
    """Multiplies by each of some tensors that it has in a list, by the first one twice."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.weights = list(weights)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for weight in (*self.weights, self.weights[0]):
            x = x * weight
        return x


def constants(model: nn.Module) -> list[Any]:
    graph = export_module(model, (torch.randn(2, 3),), {}, way="eager")
    assert [name for name, _ in graph.named_parameters()] == ["inner.weight", "inner.bias"]
    nodes = graph.graph.find_nodes(op="get_attr")
    return [value for node in nodes if (value := getattr(graph, str(node.target), None)) is not None]


@pytest.mark.parametrize("kind", [nn.Parameter, Tensor.requires_grad_])
def test_the_models_own_tensors_take_the_gradients(kind: Any) -> None:
    model = Weighted(kind(torch.ones(3)), kind(torch.ones(3)))
    by_identity = {id(value): value for value in constants(model)}
    assert {id(weight) for weight in model.weights} == set(by_identity)
    graph = export_module(model, (torch.randn(2, 3),), {}, way="eager")
    graph(torch.ones(2, 3)).sum().backward()
    ours = [weight.grad for weight in model.weights]
    for weight in model.weights:
        weight.grad = None
    model(torch.ones(2, 3)).sum().backward()
    for mine, weight in zip(ours, model.weights, strict=True):
        assert mine is not None
        assert weight.grad is not None
        assert torch.equal(mine, weight.grad)


def test_frozen_parameters_and_views_of_one_memory_are_told_apart() -> None:
    memory = torch.ones(6)
    first, second = nn.Parameter(memory[:3]), nn.Parameter(memory[3:], requires_grad=False)
    trained = [value for value in constants(Weighted(first, second)) if value.requires_grad]
    assert {id(value) for value in trained} == {id(first)}
